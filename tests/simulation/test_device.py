"""Devices, links, fleets and costs: what the catalogue says and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.simulation.cost import COST_MODELS, CostModel, check_memory
from flwr_moshpit.simulation.device import builtin_catalogue, load_catalogue
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.trainer import Cost


def test_catalogue_keeps_the_figures_that_people_get_wrong() -> None:
    devices = builtin_catalogue().devices
    # The vendor's 472 GFLOPS and 1.33 TFLOPS are float16.
    assert devices["jetson-nano"].fp32_tflops == 0.236
    assert devices["jetson-nano"].fp16_tflops == 0.472
    assert devices["jetson-tx2"].fp32_tflops == 0.666
    orin = devices["jetson-agx-orin-64gb"]
    assert orin.fp32_tflops == pytest.approx(2 * 2048 * 1.3e9 / 1e12, rel=1e-3)
    assert devices["raspberry-pi-5"].memory_bytes_per_s == pytest.approx(4 * 4267e6, rel=2e-3)
    assert devices["raspberry-pi-4"].fp16_tflops is None
    assert devices["cloud-t4"].flops_per_s == pytest.approx(0.17 * 8.1e12)


def test_every_device_is_plausible_and_says_where_its_figures_are_from() -> None:
    for device in builtin_catalogue().devices.values():
        assert device.sources, device.name
        assert 0 < device.mfu <= 0.25
        assert device.idle_w < device.power_w
        assert device.fp16_tflops is None or device.fp16_tflops >= device.fp32_tflops
        assert device.link.uplink_bytes_per_s <= device.link.downlink_bytes_per_s


def test_links_are_bytes_and_seconds_one_way() -> None:
    lte = builtin_catalogue().link("lte")
    assert lte.uplink_bytes_per_s == pytest.approx(6.3e6 / 8)
    assert lte.downlink_bytes_per_s == pytest.approx(21.3e6 / 8)
    assert lte.latency_s == pytest.approx(0.0275)
    assert lte.jitter_s == pytest.approx(0.0055)
    assert lte.loss == 0


def test_a_device_can_be_put_on_another_link() -> None:
    catalogue = builtin_catalogue()
    device = catalogue.device("jetson-nano@lte")
    assert device.name == "jetson-nano@lte"
    assert device.link == catalogue.link("lte")
    assert device.fp32_tflops == catalogue.device("jetson-nano").fp32_tflops
    with pytest.raises(ConfigError, match="link 'ltee' is unknown; did you mean lte"):
        catalogue.device("jetson-nano@ltee")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_adds_devices_and_replaces_single_figures(tmp_path: Path) -> None:
    own = write(
        tmp_path / "own.toml",
        """
        [device.jetson-nano]
        mfu = 0.2
        [device.my-box]
        fp32_tflops = 1
        memory_gb = 2.5
        memory_gb_per_s = 10
        power_w = 9
        idle_w = 0
        link = "my-line"
        [link.my-line]
        downlink_mbit_per_s = 16
        uplink_mbit_per_s = 8
        rtt_ms = 0
        loss = 0.01
        """,
    )
    catalogue = load_catalogue(own)
    nano = catalogue.device("jetson-nano")
    assert (nano.mfu, nano.fp32_tflops) == (0.2, 0.236)
    assert "mfu" in builtin_catalogue().device("jetson-nano").unverified
    assert "mfu" not in nano.unverified
    box = catalogue.device("my-box")
    assert (box.memory_bytes, box.mfu, box.link.uplink_bytes_per_s) == (2_500_000_000, 0.17, 1e6)
    assert box.link.loss == 0.01


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[device.jetson-nano]\nmfu = 0", "own.toml: device 'jetson-nano': mfu must be above 0"),
        ("[device.jetson-nano]\nmfu = 1.5", "mfu must be at most 1, not 1.5"),
        ("[device.jetson-nano]\npower_w = -1", "power_w must be above 0, not -1"),
        ("[device.jetson-nano]\nmemory_gb = 'x'", "memory_gb must be a number, not 'x'"),
        ("[device.jetson-nano]\nmemory_gb = true", "memory_gb must be a number, not True"),
        ("[device.jetson-nano]\nfp32_tflops = nan", "fp32_tflops must be a number, not nan"),
        ("[device.jetson-nano]\nfp32_tflop = 1", "key 'fp32_tflop' is unknown; did you mean fp32_"),
        ("[device.jetson-nano]\nlink = 'g5'", "device 'jetson-nano': link 'g5' is unknown; did"),
        ("[device.new]\nfp32_tflops = 1", "device 'new' lacks 'memory_gb'"),
        ("[device]\nnew = 3", "device 'new' must be a table, not 3"),
        ("[device.'a:b']\nmfu = 1", "a name holds none of the signs"),
        ("[link.lte]\nloss = 2", "own.toml: link 'lte': loss must be below 1, not 2"),
        ("[links.lte]\nloss = 0", "table 'links' is unknown; did you mean link"),
        ("[device.x", "is not TOML"),
    ],
)
def test_bad_figures_are_named_with_file_device_and_key(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_catalogue(write(tmp_path / "own.toml", text))
    assert complaint in str(error.value)
    assert "own.toml" in str(error.value)
    assert "\n" not in str(error.value) or "not TOML" in complaint


def test_a_missing_catalogue_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the catalogue nowhere\.toml"):
        load_catalogue("nowhere.toml")


def test_a_mix_is_apportioned_exactly() -> None:
    fleet = Fleet.parse("jetson-nano:0.6,jetson-orin-nano:0.3,cloud-t4:0.1", 10)
    assert fleet.counts() == {"jetson-nano": 6, "jetson-orin-nano": 3, "cloud-t4": 1}
    thirds = {"jetson-nano": 1 / 3, "jetson-tx2": 1 / 3, "cloud-t4": 1 / 3}
    assert Fleet.mix(thirds, 100).counts()["jetson-nano"] == 34
    assert len(Fleet.mix(thirds, 1)) == 1


@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any),
    size=st.integers(1, 300),
)
@settings(deadline=None)
def test_counts_are_the_shares_within_one(weights: list[int], size: int) -> None:
    names = list(builtin_catalogue().devices)[: len(weights)]
    shares = {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}
    counts = Fleet.mix(shares, size).counts()
    assert sum(counts.values()) == size
    for name, share in shares.items():
        assert abs(counts.get(name, 0) - share * size) < 1


def test_the_order_of_a_mix_depends_on_its_seed_alone() -> None:
    shares = {"jetson-nano": 0.5, "cloud-t4": 0.5}
    first = [device.name for device in Fleet.mix(shares, 40, seed=1)]
    assert first == [device.name for device in Fleet.mix(shares, 40, seed=1)]
    assert first != [device.name for device in Fleet.mix(shares, 40, seed=2)]
    assert first != sorted(first)
    assert first != sorted(first, reverse=True)


def test_a_single_name_stands_for_the_whole_fleet() -> None:
    assert Fleet.parse("jetson-nano", 3) == Fleet.uniform("jetson-nano", 3)
    assert Fleet.parse("jetson-nano@5g", 3).counts() == {"jetson-nano@5g": 3}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("jetson-nano:0.6,cloud-t4:0.3", "the shares must sum to 1, but 0.6 + 0.3 = 0.9"),
        ("jetson-nan:1", "device 'jetson-nan' is unknown; did you mean jetson-nano"),
        ("toaster:1", "device 'toaster' is unknown; there are: jetson-nano, "),
        ("jetson-nano:1.5,cloud-t4:-0.5", "the share of cloud-t4 must be in [0, 1], not -0.5"),
        ("jetson-nano:x", "'jetson-nano:x' is not DEVICE:SHARE"),
        ("jetson-nano,cloud-t4", "'jetson-nano' is not DEVICE:SHARE"),
        ("jetson-nano:0.5,jetson-nano:0.5", "jetson-nano is named twice"),
        ("", "'' is not DEVICE:SHARE"),
    ],
)
def test_a_bad_mix_is_refused_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        Fleet.parse(text, 10)
    assert complaint in str(error.value)


def test_no_peers_is_refused() -> None:
    with pytest.raises(ConfigError, match="peers must be at least 1, not 0"):
        Fleet.uniform("jetson-nano", 0)


def test_a_job_that_does_not_fit_names_device_and_bytes() -> None:
    fleet = Fleet.mix({"jetson-nano": 0.5, "cloud-t4": 0.5}, 4)
    check_memory(fleet, Cost(1.0, 1, 4_000_000_000))
    with pytest.raises(ConfigError, match=r"4,000,000,001 bytes.*jetson-nano has 4,000,000,000"):
        check_memory(fleet, Cost(1.0, 1, 4_000_000_001))


def test_built_in_costs_are_what_their_arithmetic_says() -> None:
    resnet, albert = COST_MODELS["resnet50"], COST_MODELS["albert-large"]
    assert (resnet.params, resnet.flops_per_example) == (25.6e6, 24.6e9)
    assert resnet.memory_bytes == pytest.approx(3.15e9, rel=2e-3)
    assert albert.params == 17.7e6
    assert albert.flops_per_example == pytest.approx(1.02e12, rel=5e-3)
    assert albert.memory_bytes == pytest.approx(2.15e9, rel=5e-3)


def test_another_models_step_lasts_as_long_as_its_own() -> None:
    resnet = COST_MODELS["resnet50"]
    seen = resnet.stand_in_for(Cost(flops_per_example=5.0, examples_per_step=8, memory_bytes=7))
    assert seen.flops_per_example * 8 == pytest.approx(24.6e9 * 32)
    assert seen.memory_bytes == resnet.memory_bytes


def test_a_cost_can_come_from_a_file(tmp_path: Path) -> None:
    text = "params = 10\nflops_per_example = 2e9\nexamples_per_step = 4\nmemory_bytes = 100\n"
    model = CostModel.load(str(write(tmp_path / "cost.toml", text)))
    assert model == CostModel(
        params=10, flops_per_example=2e9, examples_per_step=4, memory_bytes=100
    )
    assert CostModel.load("resnet50") is COST_MODELS["resnet50"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("params = 1", "has no key 'flops_per_example'"),
        ("params = 1\nparam = 2", "has an unknown key 'param'"),
        (
            "params=1\nflops_per_example=1\nexamples_per_step=1\nmemory_bytes=1\nx=1",
            "has an unknown key 'x'",
        ),
        (
            "params=0\nflops_per_example=1\nexamples_per_step=1\nmemory_bytes=1",
            "params must be above 0, not 0",
        ),
        (
            "params='a'\nflops_per_example=1\nexamples_per_step=1\nmemory_bytes=1",
            "params must be a number, not 'a'",
        ),
        ("params =", "is not TOML"),
    ],
)
def test_a_bad_cost_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        CostModel.load(str(write(tmp_path / "cost.toml", text)))
    assert complaint in str(error.value)


def test_an_unknown_cost_is_refused() -> None:
    with pytest.raises(ConfigError, match="'resnet' is neither resnet50, albert-large nor a read"):
        CostModel.load("resnet")
