"""A torch model whose averaged parameters lie in one flat tensor, and what one batch costs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from flwr_moshpit.protocol.machine import Vector
from flwr_moshpit.trainer import Cost
from flwr_moshpit.vector import Layout


def model_arrays(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of `state_dict`, without what else a module may put there."""
    state = module.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


class FlatModel:
    """`module` with its parameters as views of one tensor (d,) in the order of `layout`.

    What cannot be a view is copied in and out: buffers, which modules may replace, parameters of
    another type than the vector's, and the second name of a parameter that has two.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module = module
        self.layout = layout
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        dtype = torch.float64 if layout.dtype == np.float64 else torch.float32
        self._staging = torch.zeros(layout.dim, dtype=dtype)
        """On the host; on a CPU it is the model's own storage."""
        self._flat = self._staging.to(device)
        self._parts: list[tuple[Tensor, nn.Module, str]] = []
        """Each averaged array: its part of the flat tensor, its module and name there."""
        self._copied: list[tuple[Tensor, nn.Module, str]] = []
        """Those of `_parts` that are not views of it."""
        self._kept: list[tuple[str, nn.Module, str]] = []
        seen: list[nn.Parameter] = []
        for spec in layout.averaged:
            part = self._flat[layout.slices[spec.name]].view(spec.shape)
            owner, attribute = _owner(module, spec.name)
            tensor = getattr(owner, attribute)
            self._parts.append((part, owner, attribute))
            again = any(tensor is other for other in seen)
            if isinstance(tensor, nn.Parameter) and tensor.dtype == dtype and not again:
                part.copy_(tensor.detach())
                tensor.data = part
                seen.append(tensor)
            else:
                self._copied.append((part, owner, attribute))
        for name in layout.kept_names:
            self._kept.append((name, *_owner(module, name)))
        self.kept: dict[str, Tensor] = {}
        """What every client begins with outside the vector."""
        self.save_kept(self.kept)

    @torch.no_grad()
    def load(self, params: Vector, kept: Mapping[str, Tensor]) -> None:
        """Become the model at `params`, (d,), with the arrays in `kept`."""
        np.copyto(self._staging.numpy(), params)
        if self._flat is not self._staging:
            self._flat.copy_(self._staging)
        self._spread()
        for name, owner, attribute in self._kept:
            getattr(owner, attribute).copy_(kept[name])

    @torch.no_grad()
    def params(self) -> Vector:
        """The averaged arrays of the moment, (d,), read-only."""
        for part, owner, attribute in self._copied:
            part.copy_(getattr(owner, attribute))
        vector: Vector = np.array(self._flat.cpu().numpy())
        vector.flags.writeable = False
        return vector

    @torch.no_grad()
    def save_kept(self, kept: dict[str, Tensor]) -> None:
        """Put copies of the arrays outside the vector into `kept`."""
        for name, owner, attribute in self._kept:
            kept[name] = getattr(owner, attribute).detach().clone()

    def tensor(self, vector: Vector) -> Tensor:
        """`vector` (d,) on the model's device and in its type."""
        return torch.from_numpy(np.array(vector)).to(self._flat)

    @torch.no_grad()
    def gradient(self, learning_rate: float) -> Tensor:
        """The gradient at the loaded point after `backward`, (d,).

        Buffers have the gradient whose step at `learning_rate` makes the change that the forward
        pass made to them, so that gradient methods move them as training would. It is zero for
        parameters that do not require one.
        """
        flat = torch.zeros_like(self._flat)
        for (part, owner, attribute), name in zip(self._parts, self.layout.slices, strict=True):
            tensor = getattr(owner, attribute)
            out = flat[self.layout.slices[name]].view(part.shape)
            if not isinstance(tensor, nn.Parameter):
                torch.sub(part, tensor.to(part), out=out).div_(learning_rate)
            elif tensor.grad is not None:
                out.copy_(tensor.grad)
        return flat

    @torch.no_grad()
    def step(self, direction: Tensor, learning_rate: float) -> None:
        """params <- params - learning_rate * direction, both (d,).

        Parameters outside the vector take the step of their own gradients.
        """
        self._flat.sub_(direction, alpha=learning_rate)
        self._spread()
        for _, owner, attribute in self._kept:
            tensor = getattr(owner, attribute)
            if tensor.grad is not None:
                tensor.sub_(tensor.grad, alpha=learning_rate)

    def _spread(self) -> None:
        for part, owner, attribute in self._copied:
            getattr(owner, attribute).copy_(part)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


class Meter:
    """Counts, inside a `with` block, the FLOPs of torch and the bytes that autograd saves."""

    def __init__(self, own: Iterable[Tensor] = ()) -> None:
        self._own = {tensor.data_ptr() for tensor in own}
        """Of the model: autograd saves it too, but not in addition."""
        self._saved: dict[int, int] = {}
        self._counter = FlopCounterMode(display=False)
        self._hooks = saved_tensors_hooks(self._count, lambda tensor: tensor)

    def _count(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self._own:
            # By storage: views of one tensor are saved once, and memory used again counts once.
            storage = tensor.untyped_storage()
            self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> Meter:
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._counter.__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def flops(self) -> int:
        return self._counter.get_total_flops()

    @property
    def saved_bytes(self) -> int:
        return sum(self._saved.values())


def model_cost(
    module: nn.Module,
    x: Any,
    y: Any,
    loss: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> Cost:
    """Trains `module`, which is spoilt by it, on one batch, and counts."""
    optimizer = make_optimizer(module.parameters())
    module.train()
    with Meter([*module.parameters(), *module.buffers()]) as meter:
        loss(module(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    memory_bytes = (
        sum(_nbytes(p) + _nbytes(p.grad) for p in module.parameters())
        + sum(_nbytes(buffer) for buffer in module.buffers())
        + sum(_nbytes(value) for value in states)
        + meter.saved_bytes
    )
    return Cost(
        flops_per_example=meter.flops / len(y),
        examples_per_step=len(y),
        memory_bytes=memory_bytes,
    )


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0
