"""The states of layers that keep no tokens: short convolutions, Mamba, linear attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class RecurrentState:
    """`tensors[name]` is [rows, ...], one row for one text; names are `<layer>.conv` and `<layer>.ssm`.

    A layer with several states of one kind numbers those behind the first: `<layer>.conv.1`. Steps change the tensors
    in place.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def get(self, kind: str, layer: int, index: int) -> Tensor | None:
        return self.tensors.get(_name(kind, layer, index))

    def slide(self, layer: int, index: int, new: Tensor, width: int) -> Tensor:
        """Takes a convolution's new inputs [rows, channels, tokens]; returns them behind the `width` that were kept."""
        name = _name("conv", layer, index)
        if name not in self.tensors:
            whole = pad(new, (max(width - new.shape[-1], 0), 0))
            self.tensors[name] = whole[..., -width:].clone()
            return whole
        kept = self.tensors[name]
        whole = torch.cat([kept, new], -1)
        kept.copy_(whole[..., -width:])
        return whole

    def replace(self, layer: int, index: int, new: Tensor) -> Tensor:
        """Takes a layer's new recurrent state [rows, ...], in the dtype of its first."""
        name = _name("ssm", layer, index)
        if name not in self.tensors:
            self.tensors[name] = new.clone()
        else:
            self.tensors[name].copy_(new)
        return self.tensors[name]

    def rows(self, first: int, stop: int) -> "RecurrentState":
        """Some rows, sharing their memory."""
        return RecurrentState({name: tensor[first:stop] for name, tensor in self.tensors.items()})

    def grow(self, rows: int) -> None:
        """Makes room for so many rows, keeping those it has."""
        for name, tensor in self.tensors.items():
            wider = tensor.new_zeros((rows, *tensor.shape[1:]))
            wider[: tensor.shape[0]] = tensor
            self.tensors[name] = wider

    def put(self, row: int, source: "RecurrentState", source_row: int, *, rows: int) -> None:
        """Copies a row of another state here, where there is room for `rows`."""
        for name, tensor in source.tensors.items():
            if name not in self.tensors:
                self.tensors[name] = tensor.new_zeros((rows, *tensor.shape[1:]))
            self.tensors[name][row] = tensor[source_row]


def _name(kind: str, layer: int, index: int) -> str:
    return f"{layer}.{kind}.{index}" if index else f"{layer}.{kind}"
