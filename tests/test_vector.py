from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_moshpit.errors import ConfigError, SchemaError
from flwr_moshpit.vector import Layout

DTYPES = ["float16", "float32", "float64", "int64", "int8", "uint16", "bool"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def models(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of any kind by name, at least one of them of floats; some not contiguous."""
    names = draw(st.lists(st.text("abc.", min_size=1, max_size=4), unique=True, max_size=5))
    model = {}
    for name in names:
        array = draw(hnp.arrays(draw(st.sampled_from(DTYPES)), draw(SHAPES)))
        model[name] = array.T if draw(st.booleans()) else array
    model["weight"] = draw(hnp.arrays("float32", draw(SHAPES)))
    return model


def same_bits(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()
    )


@given(models())
@settings(deadline=None)
def test_arrays_come_back_as_they_went(model: dict[str, np.ndarray[Any, Any]]) -> None:
    layout = Layout.of(model)
    vector = layout.flatten(model)
    assert vector.shape == (layout.dim,)
    assert not vector.flags.writeable
    back = layout.unflatten(vector, layout.kept(model))
    assert back.keys() == model.keys()
    for name, array in model.items():
        if vector.dtype == array.dtype or name in layout.kept_names:
            assert same_bits(back[name], array), name
        else:
            # Between float types a signalling NaN may turn quiet; every other value is exact.
            assert back[name].dtype == array.dtype
            np.testing.assert_array_equal(back[name], array)


@given(models(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_of_names_does_not_matter(model: dict[str, Any], random: Any) -> None:
    names = list(model)
    random.shuffle(names)
    shuffled = {name: model[name] for name in names}
    assert Layout.of(shuffled).schema == Layout.of(model).schema
    assert same_bits(Layout.of(shuffled).flatten(model), Layout.of(model).flatten(shuffled))


@given(hnp.arrays("uint32", st.integers(0, 50)))
@settings(deadline=None)
def test_every_bit_pattern_passes(bits: np.ndarray[Any, Any]) -> None:
    array = bits.view("float32")
    layout = Layout.of([array])
    assert same_bits(layout.unflatten(layout.flatten([array]))["0"], array)


def test_float64_when_asked_or_found() -> None:
    single, double = np.zeros(2, "float32"), np.zeros(2)
    assert Layout.of([single]).dtype == np.float32
    assert Layout.of([single, double]).dtype == np.float64
    assert Layout.of([single], dtype="float64").dtype == np.float64
    assert Layout.of([single, double], exclude=["1"]).dtype == np.float32
    asked = Layout.of([single]).with_dtype("float64")
    assert asked.dtype == np.float64
    assert asked.unflatten(asked.flatten([single]))["0"].dtype == np.float32
    with pytest.raises(ConfigError, match="float16"):
        Layout.of([single], dtype="float16")


def test_integer_buffers_stay_with_the_client() -> None:
    model = {"bn.count": np.array(2**53 + 1), "bn.mean": np.ones(3, "float32")}
    layout = Layout.of(model)
    assert layout.dim == 3
    assert layout.kept_names == ("bn.count",)
    kept = layout.kept(model)
    model["bn.count"] += 1
    assert kept["bn.count"] == 2**53 + 1
    assert kept["bn.count"].dtype == np.int64
    with pytest.raises(SchemaError, match=r"bn\.count"):
        layout.unflatten(layout.flatten(model))


def test_excluded_names_are_kept() -> None:
    model = {f"{part}.weight": np.ones(2, "float32") for part in ("a.bn", "b.bn", "fc")}
    layout = Layout.of(model, exclude=["*.bn.*"])
    assert layout.slices == {"fc.weight": slice(0, 2)}
    assert list(layout.kept(model)) == ["a.bn.weight", "b.bn.weight"]
    with pytest.raises(ConfigError, match=r"'\*\.norm\.\*' matches none of: a\.bn\.weight, b"):
        Layout.of(model, exclude=["*.norm.*"])
    with pytest.raises(ConfigError, match="no array is left"):
        Layout.of(model, exclude="*")


def test_what_cannot_be_averaged_is_named() -> None:
    model = {"phase": np.zeros(2, "complex64"), "weight": np.zeros(2, "float32")}
    with pytest.raises(ConfigError, match=r"'phase' has dtype complex64.*exclude=\['phase'\]"):
        Layout.of(model)
    assert Layout.of(model, exclude=["phase"]).dim == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": np.zeros(2), "b": np.zeros(3)}, "'c' is missing"),
        ({**{n: np.zeros(k) for n, k in zip("abc", (2, 3, 4), strict=True)}, "d": 0}, "'d'"),
        ({"a": np.zeros(2), "b": np.zeros((3, 1)), "c": np.zeros(5)}, r"'b'.*shape.*\(3, 1\)"),
        ({"a": np.zeros(2), "b": np.zeros(3, "int64"), "c": np.zeros(4)}, "'b'.*int64"),
    ],
)
def test_flatten_names_the_first_difference(other: dict[str, Any], message: str) -> None:
    layout = Layout.of({"a": np.zeros(2), "b": np.zeros(3), "c": np.zeros(4)})
    with pytest.raises(SchemaError, match=message):
        layout.flatten(other)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"b": np.zeros(3, "float32")}, "'a' is missing"),
        ({"a": np.zeros(2), "aa": np.zeros(1), "b": np.zeros(3)}, "'aa'.*unknown"),
        ({"a": np.zeros(3), "b": np.zeros(3)}, r"'a' differs in shape: \(2,\) here, \(3,\) there"),
        ({"a": np.zeros(2), "b": np.zeros(3, "float16")}, "'b'.*float32 here, float16 there"),
    ],
)
def test_check_names_the_first_difference(other: dict[str, Any], message: str) -> None:
    layout = Layout.of({"a": np.zeros(2), "b": np.zeros(3, "float32")})
    differing = Layout.of(other)
    assert differing.schema != layout.schema
    with pytest.raises(SchemaError, match=message):
        layout.check(differing)


def test_check_sees_the_dtype_of_the_vector() -> None:
    layout = Layout.of([np.zeros(2, "float32")])
    layout.check(Layout.of([np.ones(2, "float32")]))
    with pytest.raises(SchemaError, match="float32 here, float64 there"):
        layout.check(layout.with_dtype("float64"))


def test_schema_ignores_what_is_kept_and_is_stable() -> None:
    averaged = {"w": np.zeros((2, 3), "float32")}
    schema = Layout.of(averaged).schema
    assert Layout.of({**averaged, "n": np.array(0)}).schema == schema
    assert len(schema) == 16
    # Peers of different releases compare this: a change of the hash is a change of the wire.
    assert schema.hex() == "b4656244d474713a10fa5cdfa1c80793"


def test_one_copy_in_and_none_out() -> None:
    array = np.ones((1000, 500), "float32")
    layout = Layout.of([array])
    tracemalloc.start()
    try:
        vector = layout.flatten([array])
        _, peak = tracemalloc.get_traced_memory()
        assert peak < array.nbytes * 1.1
        tracemalloc.reset_peak()
        back = layout.unflatten(vector)["0"]
        _, peak = tracemalloc.get_traced_memory()
        assert peak < array.nbytes * 1.1
    finally:
        tracemalloc.stop()
    assert back.base is not None
    assert np.shares_memory(back, vector)
    with pytest.raises(SchemaError, match="500001"):
        layout.unflatten(np.zeros(500_001, "float32"))


def test_torch_state_dict_with_bfloat16_and_buffers() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].bfloat16()
    state = model.state_dict()
    state["0.weight"] = state["0.weight"].T
    layout = Layout.of(state)
    assert layout.kept_names == ("1.num_batches_tracked",)
    assert layout.dtype == np.float32
    assert layout.dim == 12 + 4 + 4 * 4
    back = layout.unflatten(layout.flatten(state), layout.kept(state))
    for name, tensor in state.items():
        assert torch.equal(
            torch.as_tensor(np.array(back[name]))
            if isinstance(back[name], np.ndarray)
            else back[name],
            tensor,
        ), name
        assert str(back[name].dtype).removeprefix("torch.") == str(tensor.dtype)[6:]
    kept = Layout.of(state, exclude=["0.*"]).kept(state)
    state["0.bias"].zero_()
    assert kept["0.bias"].dtype == torch.bfloat16
    assert kept["0.bias"].any()


def test_flower_array_record() -> None:
    app = pytest.importorskip("flwr.app")
    arrays = [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(3), np.float32(2)]
    arrays.append(np.zeros((0, 2)))
    record = app.ArrayRecord([np.asarray(array) for array in arrays])
    layout = Layout.of(record)
    assert layout.kept_names == ("1",)
    back = layout.unflatten(layout.flatten(record), layout.kept(record))
    for name, array in back.items():
        assert same_bits(np.asarray(array), np.asarray(arrays[int(name)]))


def test_importing_it_imports_neither_torch_nor_flwr() -> None:
    code = (
        "import sys, flwr_moshpit.vector; sys.exit('torch' in sys.modules or 'flwr' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_arrays_come_back_in_the_models_own_order() -> None:
    """Who reads a list of them goes by their order, of which "10" before "2" is none."""
    arrays = [np.full(1, number, "float32") for number in range(12)]
    layout = Layout.of(arrays).with_dtype("float64")
    named = layout.unflatten(layout.flatten(arrays))
    assert [float(array[0]) for array in named.values()] == list(range(12))
    mixed = {"w": np.zeros(1, "float32"), "n": np.zeros(1, "int64"), "b": np.zeros(1, "float32")}
    layout = Layout.of(mixed)
    assert list(layout.unflatten(layout.flatten(mixed), layout.kept(mixed))) == ["w", "n", "b"]
    # Where they lie in the vector does not depend on it.
    assert layout.schema == Layout.of(dict(sorted(mixed.items()))).schema
