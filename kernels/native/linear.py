"""Linear layers of a model, quick for the few rows of a decode step."""

import torch
from torch import Tensor, nn

from kernels.native.library import Library, LinearCall, pointer

MOST_ROWS = 128  # of float32; beyond, torch's own product is as fast
PAIR_DEPTH, PAIR_ROWS = 32, 16  # where bfloat16 is multiplied in pairs, inputs and outputs are multiples of these


class NativeLinear(nn.Linear):
    """The same layer and weights; a few rows of float32 go through linear.cpp."""

    library: Library

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 # torch's name
        rows = input.numel() // self.in_features
        weight = self.weight
        if not 0 < rows <= MOST_ROWS or input.dtype != torch.float32 or not weight.is_contiguous():
            return super().forward(input)
        x = input.reshape(rows, self.in_features)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((*input.shape[:-1], self.out_features))
        self.library.linear(
            LinearCall(
                x=pointer(x), w=pointer(weight), bias=pointer(self.bias), out=pointer(out), rows=rows,
                **{"in": self.in_features}, out_features=self.out_features, x_row=x.stride(0), pairs=False,
            )
        )  # fmt: skip
        return out


def quicken(model: nn.Module, library: Library) -> None:
    """Makes the model's plain float32 linear layers on the CPU such layers."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32:
            layer.__class__ = NativeLinear
            object.__setattr__(layer, "library", library)  # no parameter and no module


def largest_error(library: Library) -> float:
    """Relative, of products of random numbers against torch's in float64; NaN where one is."""
    generator = torch.Generator().manual_seed(20261130)
    errors = []
    for rows, size, out in ((1, 40, 67), (5, 129, 6), (14, 576, 33), (48, 64, 128), (128, 1100, 97)):
        layer = nn.Linear(size, out)
        x = torch.randn((rows, size), generator=generator)
        expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        quicken(layer, library)
        with torch.inference_mode():
            errors.append(((layer(x).double() - expected).norm() / expected.norm()).float())
    return float(torch.stack(errors).max())
