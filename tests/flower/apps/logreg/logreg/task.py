"""logreg: A Flower / scikit-learn app."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


def load_data(partition_id: int, num_partitions: int):
    """Load partition data."""
    X, y = load_digits(return_X_y=True)
    X, y = X[partition_id::num_partitions] / 16, y[partition_id::num_partitions]
    cut = int(0.8 * len(X))
    return X[:cut], X[cut:], y[:cut], y[cut:]


def create_log_reg_and_instantiate_parameters(penalty):
    model = LogisticRegression(
        l1_ratio=0 if penalty == "l2" else 1,
        solver="saga",
        max_iter=1,  # local epoch
        warm_start=True,  # prevent refreshing weights when fitting,
    )
    # Setting initial parameters, akin to model.compile for keras models
    set_initial_params(model, n_features=64, n_classes=10)
    return model


def get_model_parameters(model):
    return [model.coef_, model.intercept_]


def set_model_params(model, params):
    model.coef_ = params[0]
    model.intercept_ = params[1]
    return model


def set_initial_params(model, n_classes, n_features):
    model.classes_ = np.array(list(range(n_classes)))
    model.coef_ = np.zeros((n_classes, n_features))
    model.intercept_ = np.zeros((n_classes,))
