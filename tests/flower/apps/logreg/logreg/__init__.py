"""logreg: A Flower / scikit-learn app."""
