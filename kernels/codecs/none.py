"""`none`: the numbers as they are."""

from collections.abc import Mapping

from torch import Tensor

from kernels.codecs.base import Kind, Raw, take


class Plain:
    name = "none"
    lossless = True

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        return {"": tensor.cpu()}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], raw: Raw, device: str) -> Tensor:
        return take(parts, "", raw.shape, raw.dtype).to(device)
