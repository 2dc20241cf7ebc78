"""Codecs are as exact as they say, and what they leave out comes later."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_moshpit.compression import BLOCK, CODECS, Codec, Feedback, agreed, codec_of
from flwr_moshpit.errors import ConfigError, RemoteProtocolError

DTYPES = [np.float32, np.float64]
ALL = list(CODECS.values())
LOSSY = ALL[1:]


def bound(codec: Codec, values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """How far each element may be off."""
    exact = values.astype(np.float64)
    if codec.name == "none":
        return np.zeros(len(values))
    if codec.name == "float16":
        return np.abs(exact) * 2**-11 + 2**-25
    padded = np.zeros(-(-len(values) // BLOCK) * BLOCK)
    padded[: len(values)] = np.abs(exact)
    largest = padded.reshape(-1, BLOCK).max(axis=1, initial=0.0)
    return np.repeat(largest / 254 * (1 + 1e-5) + 1e-44, BLOCK)[: len(values)]


def coded(codec: Codec, values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return codec.decode(codec.encode(values), len(values), values.dtype)


vectors = st.one_of(
    *[
        arrays(
            dtype,
            st.integers(0, 3 * BLOCK),
            elements=st.floats(-60000, 60000, width=32, allow_subnormal=True),
            fill=st.just(0.5),
        )
        for dtype in DTYPES
    ]
)


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
@given(values=vectors)
@settings(deadline=None, max_examples=40)
def test_what_comes_back_is_as_near_as_promised(
    codec: Codec, values: npt.NDArray[np.floating]
) -> None:
    packed = codec.encode(values)
    assert len(packed) == codec.packed_bytes(len(values), values.dtype)
    back = codec.decode(packed, len(values), values.dtype)
    assert back.dtype == values.dtype
    assert not back.flags.writeable
    off = np.abs(back.astype(np.float64) - values.astype(np.float64))
    assert (off <= bound(codec, values)).all()


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
def test_sizes(codec: Codec) -> None:
    wanted = {"none": 4.0, "float16": 2.0, "int8": 1.0 + 4 / BLOCK}
    assert codec.packed_bytes(1 << 20, np.float32) / (1 << 20) == wanted[codec.name]


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_stay_finite(codec: Codec, dtype: npt.DTypeLike) -> None:
    largest = float(np.finfo(np.float32).max)
    values = np.array([largest, -largest, 1e-45, 0.0, -0.0], dtype)
    back = coded(codec, values)
    assert np.isfinite(back).all()
    assert back[0] >= (65504 if codec.name == "float16" else 0.99 * largest)
    assert np.array_equal(coded(codec, np.zeros(3, dtype)), np.zeros(3))
    assert len(coded(codec, np.zeros(0, dtype))) == 0


def test_one_large_element_does_not_spoil_the_other_blocks() -> None:
    values = np.full(4 * BLOCK, 0.01, np.float32)
    values[0] = 1000.0
    off = np.abs(coded(codec_of("int8"), values) - values)
    assert off[BLOCK:].max() < 0.01 / 254
    assert off[:BLOCK].max() > 0.001


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
def test_what_no_peer_makes_is_refused(codec: Codec) -> None:
    packed = codec.encode(np.linspace(-1, 1, 300, dtype=np.float32))
    for wrong in (packed[:-1], np.append(packed, np.uint8(0)), packed[:0], packed.reshape(1, -1)):
        with pytest.raises(RemoteProtocolError):
            codec.decode(wrong, 300, np.float32)
    broken = packed.copy()
    nan = np.float16(np.nan) if codec.name == "float16" else np.float32(np.nan)
    broken[: nan.nbytes] = np.frombuffer(nan.tobytes(), np.uint8)
    with pytest.raises(RemoteProtocolError, match="NaN"):
        codec.decode(broken, 300, np.float32)


def test_a_negative_or_overflowing_scale_is_refused() -> None:
    codec = codec_of("int8")
    packed = codec.encode(np.ones(10, np.float32))
    for scale in (-1.0, np.finfo(np.float32).max):
        broken = packed.copy()
        broken[:4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
        with pytest.raises(RemoteProtocolError):
            codec.decode(broken, 10, np.float32)


@given(data=st.binary(max_size=300), count=st.integers(0, 300))
@settings(deadline=None, max_examples=100)
def test_random_bytes_are_decoded_or_refused(data: bytes, count: int) -> None:
    for codec in ALL:
        try:
            values = codec.decode(np.frombuffer(data, np.uint8), count, np.float32)
        except RemoteProtocolError:
            continue
        assert np.isfinite(values).all()


def test_names() -> None:
    assert codec_of("int8").name == "int8"
    with pytest.raises(ConfigError, match="none, float16, int8"):
        codec_of("zip")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["int8", "int8"], "int8"),
        (["int8", "float16"], "float16"),
        (["float16", "none", "int8"], "none"),
        (["int8", "new"], "none"),
        ([], "none"),
    ],
)
def test_a_group_uses_the_most_exact_that_is_asked_for(names: list[str], wanted: str) -> None:
    assert agreed(names) == wanted


# Feedback


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_a_hundred_rounds_has_no_bias(codec: Codec, dtype: npt.DTypeLike) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(dtype)
    feedback = Feedback(codec, len(values), dtype)
    total = np.zeros(len(values))
    once = np.abs(coded(codec, values) - values).max()
    for _ in range(100):
        total += codec.decode(feedback.encode(0, values), len(values), dtype)
        feedback.commit()
    off = np.abs(total / 100 - values).max()
    assert off < 0.03 * once
    assert np.abs(feedback.residual).max() <= 2 * once


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_averaging_again_and_again_moves_no_mass(codec: Codec) -> None:
    rng = np.random.default_rng(1)
    models = [rng.standard_normal(600) for _ in range(4)]
    mean = np.mean(models, axis=0)
    feedbacks = [Feedback(codec, 600, np.float64) for _ in models]
    for _ in range(100):
        sent = [
            codec.decode(feedback.encode(0, model), 600, np.float64)
            for feedback, model in zip(feedbacks, models, strict=True)
        ]
        for feedback in feedbacks:
            feedback.commit()
        models = [np.mean(sent, axis=0)] * 4
        held = [m + f.residual for m, f in zip(models, feedbacks, strict=True)]
        np.testing.assert_allclose(np.mean(held, axis=0), mean, atol=1e-13)
    # Without feedback each round would round the same way again.
    assert np.abs(models[0] - mean).max() < 0.02


def test_a_piece_that_is_asked_for_again_is_the_same() -> None:
    feedback = Feedback(codec_of("int8"), 700, np.float32)
    values = np.random.default_rng(2).standard_normal(700).astype(np.float32)
    feedback.encode(0, values)
    feedback.commit()
    first = feedback.encode(300, values[300:])
    assert np.array_equal(first, feedback.encode(300, values[300:]))
    before = feedback.residual.copy()
    feedback.commit()
    assert np.array_equal(feedback.residual[:300], before[:300])
    assert not np.array_equal(feedback.residual[300:], before[300:])


def test_a_round_that_came_to_nothing_leaves_nothing() -> None:
    feedback = Feedback(codec_of("float16"), 10, np.float64)
    values = np.linspace(0.1, 1.0, 10)
    feedback.encode(0, values)
    feedback.rollback()
    feedback.commit()
    assert not feedback.residual.any()


def test_what_was_left_out_keeps_its_mass_when_the_weight_changes() -> None:
    feedback = Feedback(codec_of("int8"), 10, np.float64)
    feedback.encode(0, np.linspace(0.1, 1.0, 10))
    feedback.commit()
    before = feedback.residual.copy()
    feedback.rescale(3.0 / 6.0)
    np.testing.assert_allclose(6.0 * feedback.residual, 3.0 * before)
