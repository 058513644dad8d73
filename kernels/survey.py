"""What each layer of a model keeps, learnt from what transformers hands over in one short run."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.errors import ModelUnsupported
from kernels.kv import PrefixKV
from kernels.latent import latent_layers
from kernels.layout import KVLayout, LayerShape, StateShape
from kernels.steps import PrefillStep, run_step

TOKENS = 8


class _Watched(PrefillStep):
    def __init__(self, kv: PrefixKV) -> None:
        super().__init__(kv, 0, TOKENS)
        self.windows: dict[int, int] = {}

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        self.windows[layer] = window
        return super().attend(layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks)


def survey(hf: PreTrainedModel, device: torch.device, context_len: int) -> KVLayout:
    """Runs a few tokens. A window that no text can leave is none.

    Raises:
        ModelUnsupported: its layers compute or keep something that is not handed over.
    """
    if any(_limits_steps(module) for module in hf.modules()):
        reason = "its Mamba layers bound the time step where several tokens are run, and not where one is"
        raise ModelUnsupported(type(hf).__name__, reason)
    latent = latent_layers(hf)
    kv = PrefixKV(TOKENS, layout=KVLayout(latent=latent))
    step = _Watched(kv)
    with torch.inference_mode():
        run_step(hf, step, torch.zeros(TOKENS, dtype=torch.int64, device=device), 1)
    if kv.keys.keys() != step.windows.keys():
        raise ModelUnsupported(type(hf).__name__, "its layers compute their attention themselves")
    if not kv.keys and not kv.recurrent:
        raise ModelUnsupported(type(hf).__name__, "its layers keep their state themselves")
    return KVLayout(
        tokens={
            layer: LayerShape(keys.shape[0], keys.shape[2], kv.values[layer].shape[2])
            for layer, keys in kv.keys.items()
        },
        dtype=next((keys.dtype for keys in kv.keys.values()), torch.float32),
        windows={layer: width for layer, width in step.windows.items() if width < context_len and layer not in latent},
        latent=latent,
        recurrent={
            name: StateShape(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in kv.recurrent.tensors.items()
        },
    )


def _limits_steps(module: nn.Module) -> bool:
    low, high = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    return bool(low > 0 or high < float("inf"))
