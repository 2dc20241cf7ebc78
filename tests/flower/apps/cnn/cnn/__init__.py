"""cnn: A Flower / PyTorch app."""
