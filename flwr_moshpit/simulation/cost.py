"""What training costs a virtual device: another model's cost in place of one's own, and memory."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.trainer import Cost

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A model that is put on clock and links while a smaller one really trains."""

    params: float
    """Averaged parameters; the wire carries as many bytes as this model's would be."""
    flops_per_example: float
    """Forward and backward, one example."""
    examples_per_step: int
    """Examples in one optimizer step."""
    memory_bytes: int
    """Parameters, gradients, optimizer state and one batch's activations."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"cost-as: {field.name} must be above 0, not {value}")

    @classmethod
    def load(cls, name: str) -> CostModel:
        """A built-in model by its name, or one from a TOML file with this class's fields as keys.

        Raises ConfigError for what is neither, and for a key that is missing, unknown or no number.
        """
        if name in COST_MODELS:
            return COST_MODELS[name]
        path = Path(name)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            built_in = ", ".join(COST_MODELS)
            raise ConfigError(
                f"cost-as: {name!r} is neither {built_in} nor a readable TOML file"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"cost-as: {path} is not TOML: {error}") from error
        keys = [field.name for field in fields(cls)]
        for key in [*values, *keys]:
            if key not in keys or key not in values:
                problem = "has no key" if key in keys else "has an unknown key"
                wanted = ", ".join(keys)
                raise ConfigError(f"cost-as: {path} {problem} {key!r}; it needs: {wanted}")
            if isinstance(values[key], bool) or not isinstance(values[key], int | float):
                raise ConfigError(f"cost-as: {path}: {key} must be a number, not {values[key]!r}")
        return cls(
            params=float(values["params"]),
            flops_per_example=float(values["flops_per_example"]),
            examples_per_step=round(values["examples_per_step"]),
            memory_bytes=round(values["memory_bytes"]),
        )

    def stand_in_for(self, cost: Cost) -> Cost:
        """`cost` as the clock shall see it: one step lasts as long as one of this model's.

        The trainer's own examples are what is counted, so its smaller or larger batch is evened
        out in the FLOPs of each.
        """
        per_step = self.flops_per_example * self.examples_per_step
        return replace(
            cost,
            flops_per_example=per_step / cost.examples_per_step,
            memory_bytes=self.memory_bytes,
        )


def _resnet50() -> CostModel:
    """ResNet-50 (He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385).

    25.6 M parameters and 4.1 G multiply-adds forward for an image of 224 x 224 (its v1.5 form has
    25,557,032 and 4.09 G). A multiply-add is 2 FLOPs, and backward costs twice what forward does:
    4.1e9 x 2 x 3 = 24.6e9 FLOPs an image. Memory: parameters, gradients and momentum, 3 x 4 bytes
    each, and the outputs of the convolutions, 11.1 M an image, kept once for batch norm's backward
    and once for ReLU's: 307 MB + 32 x 89 MB = 3.15 GB.
    """
    params, examples = 25.6e6, 32
    return CostModel(
        params=params,
        flops_per_example=4.1e9 * 2 * 3,
        examples_per_step=examples,
        memory_bytes=round(3 * 4 * params + examples * 2 * 4 * 11.1e6),
    )


def _albert_large() -> CostModel:
    """ALBERT-large (Lan et al., arXiv 1909.11942): 17.7 M parameters, 24 layers that share weights.

    h = 1024, 16 heads, embedding 128, vocabulary 30,000, sequences of s = 512. Multiply-adds for a
    token and layer: 4 h^2 for the projections of attention, 8 h^2 for the feed-forward net, 2 s h
    for scores and mixing; 24 layers; the head h x 128 + 128 x 30,000. In all 169.5 G for a sequence
    forward, x 2 FLOPs x 3 with backward = 1.02e12. A step is 8 sequences, one at a time with their
    gradients added up. Memory: parameters, gradients and LAMB's two moments, 4 x 4 bytes each, and
    one sequence's activations, s h (34 + 5 x 16 x s / h) bytes a layer in half precision
    (Korthikanti et al., arXiv 2205.05198, eq. 2), twice that in float32: 283 MB + 1.86 GB.
    """
    params, h, s, layers, heads = 17.7e6, 1024, 512, 24, 16
    per_token = layers * (12 * h**2 + 2 * s * h) + h * 128 + 128 * 30_000
    activations = 2 * layers * s * h * (34 + 5 * heads * s / h)
    return CostModel(
        params=params,
        flops_per_example=float(per_token * s * 2 * 3),
        examples_per_step=8,
        memory_bytes=round(4 * 4 * params + activations),
    )


COST_MODELS = {"resnet50": _resnet50(), "albert-large": _albert_large()}


def check_memory(fleet: Fleet, cost: Cost) -> None:
    """Raises ConfigError naming the device and the bytes if the job does not fit one of `fleet`."""
    for name in fleet.counts():
        device = next(device for device in fleet if device.name == name)
        if cost.memory_bytes > device.memory_bytes:
            raise ConfigError(
                f"training needs {cost.memory_bytes:,} bytes of memory and {name} has "
                f"{device.memory_bytes:,}: take a smaller batch or leave it out of the fleet"
            )
