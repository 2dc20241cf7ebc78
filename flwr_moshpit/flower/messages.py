"""The messages that a ClientApp gets and gives, as flat vectors see them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from flwr_moshpit.errors import TrainerError
from flwr_moshpit.flower.compat import fill
from flwr_moshpit.protocol.machine import Evaluated, Vector
from flwr_moshpit.vector import Layout

# Flower's apps choose the names of their metrics; these are what their templates use.
_PREFIXES = ("train", "eval", "test", "val", "valid")
_ACCURACY = ("acc", "accuracy")


class Config(ConfigRecord):
    """A message's config, which knows whether the app looked for the number of local steps."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        fill(self, {name: value for name, value in values.items() if value is not None})
        self.steps_were_read = False

    def __getitem__(self, key: str) -> Any:
        if key == "local-steps":
            self.steps_were_read = True
        return super().__getitem__(key)


def array_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Flower's form of ndarrays, by one copy of each."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = _array(np.asarray(array))
    return record


def _array(array: np.ndarray[Any, Any]) -> Array:
    # `Array(array)` would copy the data twice, in `numpy.save` and out of its buffer.
    body = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    data = b"".join((_npy_header(array.dtype.str, array.shape), body.data))
    return Array(str(array.dtype), array.shape, "numpy.ndarray", data)


@lru_cache(maxsize=4096)
def _npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def scratch(context: Context) -> Context:
    """A copy of `context`: what an app stores in its state is gone afterwards."""
    state = RecordDict({name: record.copy() for name, record in context.state.items()})
    return Context(
        context.run_id,
        context.node_id,
        dict(context.node_config),
        state,
        dict(context.run_config),
        context.series_id,
    )


class Reply:
    """What a ClientApp answered. `whose` begins the message of every error."""

    def __init__(self, content: RecordDict, whose: str, steps_were_read: bool = True) -> None:
        self.content = content
        self.steps_were_read = steps_were_read
        """Whether the app looked at local-steps."""
        self._whose = whose

    def _error(self, what: str) -> TrainerError:
        return TrainerError(f"{self._whose}: the ClientApp {what}")

    def arrays(self, layout: Layout, optional: bool = False) -> Mapping[str, Array]:
        """The reply's arrays, with names and shapes of `layout`.

        Arrays that the client keeps may be missing; `optional` ones too, but not all of them.
        """
        records = self.content.array_records
        if not records:
            raise self._error('returned no ArrayRecord: its reply needs "arrays"')
        if len(records) > 1 and "arrays" not in records:
            names = ", ".join(records)
            raise self._error(f'returned several ArrayRecords, none named "arrays": {names}')
        arrays = records["arrays"] if "arrays" in records else next(iter(records.values()))
        shapes = {spec.name: spec.shape for spec in layout.averaged}
        for name, array in arrays.items():
            if name in layout.kept_names:
                continue
            if name not in shapes:
                raise self._error(
                    f"returned an array {name!r} that is unknown; there are: {', '.join(shapes)}"
                )
            if tuple(array.shape) != shapes[name]:
                raise self._error(
                    f"returned array {name!r} with shape {tuple(array.shape)} instead of "
                    f"{shapes[name]}"
                )
            if not array.dtype.startswith("float"):
                raise self._error(f"returned array {name!r} of {array.dtype} instead of floats")
        if optional and any(name in arrays for name in shapes):
            return arrays
        for name in shapes:
            if name not in arrays:
                raise self._error(f"returned no array {name!r}")
        return arrays

    def kept(self, layout: Layout) -> dict[str, Any]:
        """The arrays outside the vector, which `perform` has put beside a mean gradient."""
        kept = self.content.array_records.get("kept", ArrayRecord())
        return {name: kept[name].numpy() for name in layout.kept_names}

    def vector(self, name: str) -> Vector:
        """The one array of the ArrayRecord `name`, read-only."""
        array = self.content.array_records[name][name]
        vector: Vector = np.asarray(array.numpy())
        vector.flags.writeable = False
        return vector

    def num_examples(self) -> int:
        for record in self.content.metric_records.values():
            if "num-examples" not in record:
                continue
            value = record["num-examples"]
            if isinstance(value, list) or not (math.isfinite(value) and value >= 0):
                raise self._error(f"returned num-examples = {value!r}, which is no count")
            return int(value)
        raise self._error('returned no "num-examples" in a MetricRecord')

    def metrics(self) -> dict[str, float]:
        """The other metrics that are single numbers, under common names."""
        return common_names(
            (name, value)
            for record in self.content.metric_records.values()
            for name, value in record.items()
        )


def common_names(metrics: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Single numbers, with "loss" and "accuracy" for what apps call "train_loss" or "eval_acc"."""
    named: dict[str, float] = {}
    for name, value in metrics:
        if name == "num-examples" or isinstance(value, (list, bytes, str)):
            continue
        words = name.lower().replace("-", "_").split("_")
        word = words[-1] if len(words) == 2 and words[0] in _PREFIXES else name.lower()
        common = "accuracy" if word in _ACCURACY else "loss" if word == "loss" else name
        named.setdefault(common, float(value))
    return named


def mean_of(results: Sequence[Evaluated]) -> Evaluated:
    """The mean of what several clients measured, weighted by their examples."""
    num_examples = sum(result.num_examples for result in results)
    if num_examples == 0:
        return Evaluated(0)
    names = [name for name in results[0].metrics if all(name in r.metrics for r in results)]
    means = {
        name: sum(r.metrics[name] * r.num_examples for r in results) / num_examples
        for name in names
    }
    return Evaluated(num_examples, means)
