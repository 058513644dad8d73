import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.local_servers import Postgres, SeaweedFS, Valkey, postgres, seaweedfs, valkey

os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when Triton is first imported; 0: the kernels on a card

os.environ["PLATEMAKER_DTYPE"] = "float32"  # on every CPU, since only float32 promises equal texts

KEPT_VARIABLES = {"PLATEMAKER_DTYPE", "PLATEMAKER_SHARED_DATA", "PLATEMAKER_TEST_MODEL"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith("PLATEMAKER_") and name not in KEPT_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("PLATEMAKER_DATA_DIR", str(tmp_path / "platemaker"))


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with seaweedfs(tmp_path_factory.mktemp("s3"), "platemaker") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    # Not pytest's folder: only root may enter it, and PostgreSQL then runs as another user.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        with postgres(Path(folder) / "postgres") as server:
            yield server


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real contracts, which are not part of the project."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PLATEMAKER_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no real contracts in {folder}; set PLATEMAKER_SHARED_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers with a byte tokenizer and a chat template; answers are nonsense but exact."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-model")
    specials = ["<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(specials + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
