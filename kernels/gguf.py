"""Converts a GGUF file to a safetensors folder, once."""

import shutil
import tempfile
from pathlib import Path

from kernels.errors import ModelIncomplete, ModelMissing


def convert_gguf(source: Path, target: Path) -> Path:
    """Dequantises `source` into the folder `target` in bfloat16; does nothing where that folder exists.

    The folder appears at once and whole, so a conversion that was interrupted is simply done again.

    Raises:
        ModelMissing: no such file.
        ModelIncomplete: transformers cannot read it.
    """
    if (target / "config.json").exists():
        return target
    if not source.is_file():
        raise ModelMissing(str(source), "there is no such GGUF file")
    import torch  # here, so that asking for a finished conversion costs no import of torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # it warns that packed weights would be slow in bfloat16; here they are unpacked

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
        # The weights are plain tensors now; what is left of the quantiser would make save_pretrained refuse.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.is_quantized = False
        model.hf_quantizer = None
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except (ValueError, KeyError, NotImplementedError) as exc:
        raise ModelIncomplete(str(source), f"transformers cannot read this GGUF file ({exc})") from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
