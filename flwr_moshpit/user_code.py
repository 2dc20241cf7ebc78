"""Calling code that is not ours: random draws pinned, errors that say whose call it was."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from flwr_moshpit.errors import ConfigError, MoshpitError, TrainerError


@dataclass(slots=True)
class Call:
    """Where the user's code is; the caller keeps it up to date."""

    client: int | None
    """None for what belongs to no client, such as an evaluation on the whole task's test data."""
    step: int | None = None
    """The client's optimizer step, counted from 1 over all its calls; None outside training."""

    def __str__(self) -> str:
        whose = "the whole task" if self.client is None else f"client {self.client}"
        return whose if self.step is None else f"{whose}, step {self.step}"


@contextmanager
def user_code(call: Call, seed: int) -> Iterator[None]:
    """Run the user's code under `seed`.

    Whatever it raises becomes a TrainerError whose message names client and step in its first line
    and holds the traceback, because causes do not survive the way back from a worker process. A
    package that is not installed is a matter of set-up, and a ConfigError.
    """
    with pinned(seed):
        try:
            yield
        except MoshpitError:
            raise
        except ModuleNotFoundError as error:
            raise ConfigError(f"{call}: {error}") from error
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            raise TrainerError(f"{call}: {type(error).__name__}: {error}\n{trace}") from error


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Sums depend on how many threads share them, so one, here and in every worker."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 1
    if torch is None or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def pinned(seed: int) -> Iterator[None]:
    """Seed the global generators of random, numpy and torch; put their states back at the end.

    torch counts only where somebody has imported it: this module does not.
    """
    torch = sys.modules.get("torch")
    python_state = random.getstate()
    # Saving numpy's state costs 50 times what putting another generator in its place does.
    numpy_generator = _numpy_random.get_bit_generator()
    numpy_spare = _spare_generators.pop() if _spare_generators else np.random.MT19937()
    _numpy_random.set_bit_generator(numpy_spare)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - users' code draws from the global generator
    restore_torch = _seed_torch(torch, seed) if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        _numpy_random.set_bit_generator(numpy_generator)
        _spare_generators.append(numpy_spare)
        if restore_torch is not None:
            restore_torch()


_spare_generators: list[Any] = []
_numpy_random: Any = np.random  # its stubs lack the two functions used here


def _seed_torch(torch: Any, seed: int) -> Callable[[], None]:
    """Seed torch and return what undoes it."""
    state = torch.get_rng_state()
    if not _has_accelerator():
        # `torch.manual_seed` takes 0.15 ms to ask after every kind of accelerator.
        torch.default_generator.manual_seed(seed % 2**63)
        return lambda: torch.set_rng_state(state)
    # Devices that are not in use yet have no state to save; `manual_seed` reaches them later.
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch.manual_seed(seed % 2**63)

    def restore() -> None:
        torch.set_rng_state(state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)

    return restore


@cache
def _has_accelerator() -> bool:
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_available() or torch.backends.mps.is_available())
