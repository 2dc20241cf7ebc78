"""private: A Flower / PyTorch app."""
