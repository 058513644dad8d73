"""What a seed works on: the beginnings of real contracts, a checklist, and a tiny model."""

from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "pipeline" / "samples" / "supply-agreement.txt"
QUESTIONS = Path(__file__).with_name("questions.txt")


def write_documents(folder: Path, data: Path, count: int, characters: int) -> tuple[list[Path], str]:
    """Writes `count` different texts of about so many characters; returns them, and where they are from."""
    contracts = [path.read_text(errors="replace") for path in sorted((data / "contracts").rglob("*.txt"))]
    long_enough = dict.fromkeys(text[:characters] for text in contracts if len(text) >= characters)
    texts = list(islice(long_enough, count))
    origin = f"the first {characters:,} characters of {count} contracts in {data}"
    if len(texts) < count:
        whole = SAMPLE.read_text()
        step = max(1, (len(whole) - characters) // count)
        texts = [f"Part {at + 1}.\n{whole[at * step :][:characters]}" for at in range(count)]
        origin = f"parts of {SAMPLE.name}, for there are not {count} contracts in {data}"
    folder.mkdir()
    paths = [folder / f"{number:02d}.txt" for number in range(1, count + 1)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths, origin


def write_questions(path: Path, count: int) -> Path:
    lines = QUESTIONS.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in lines[:count]))
    return path


def write_model(folder: Path) -> Path:
    """A random Llama with a byte tokenizer; its answers are nonsense, but always the same. A token of KV takes 4 KiB,
    so that a chunk of 2,304 tokens goes to the store in two parts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<|im_start|>", "<|im_end|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>")
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
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=32_768,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
