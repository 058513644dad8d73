"""Windows and recurrent states: how much is kept, and that only what fits comes back."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kernels.codecs.layout import OWN_KEY
from kernels.codecs.state import decode_state, encode_state
from kernels.decode import Decoder, DecodeRequest
from kernels.errors import ChunkMismatch
from kernels.fidelity import measure_loss
from kernels.kv import PrefixKV
from kernels.model import LanguageModel, prepare_model
from kernels.params import GenerationParams
from kernels.prefill import check_probe, chunk_stops, prefill
from kernels.steps import PrefillStep
from tests.kernels.families import CONTEXT, SUPPORTED_FAMILIES, WINDOW
from tests.kernels.store import Stored

STATEFUL = ["mistral", "gemma3", "qwen3-next", "lfm2", "falcon-h1", "mamba2"]


@pytest.fixture(scope="module")
def load_family(build_model: Callable[[PreTrainedConfig], PreTrainedModel]) -> Callable[[str], LanguageModel]:
    made: dict[str, LanguageModel] = {}

    def loader(name: str) -> LanguageModel:
        if name not in made:
            made[name] = prepare_model(
                build_model(copy.deepcopy(SUPPORTED_FAMILIES[name])), torch.device("cpu"), CONTEXT
            )
        return made[name]

    return loader


@pytest.fixture
def ids(generator: torch.Generator) -> list[int]:
    drawn: list[int] = torch.randint(3, 128, (150,), generator=generator).tolist()
    return drawn


def read(model: LanguageModel, ids: list[int], chunk_tokens: int = 32) -> PrefixKV:
    return prefill(model, ids, stops=chunk_stops(len(ids), 0, chunk_tokens)).kv


def put_back(model: LanguageModel, tensors: dict[str, Tensor], length: int) -> None:
    model.new_kv(CONTEXT).set_state(length, tensors)


def test_the_windows_of_the_layers_are_learnt(load_family: Callable[[str], LanguageModel]) -> None:
    assert load_family("mistral").windows == {0: WINDOW, 1: WINDOW}
    assert load_family("gemma3").windows == {0: WINDOW, 1: WINDOW}
    assert load_family("llama").windows == {}


def test_a_window_that_no_text_can_leave_is_none(build_model: Callable[[PreTrainedConfig], PreTrainedModel]) -> None:
    hf = build_model(copy.deepcopy(SUPPORTED_FAMILIES["mistral"]))

    assert prepare_model(hf, torch.device("cpu"), WINDOW).windows == {}
    assert prepare_model(hf, torch.device("cpu"), WINDOW + 1).windows == {0: WINDOW, 1: WINDOW}


def test_the_layers_stored_by_tokens_are_those_that_keep_all(load_family: Callable[[str], LanguageModel]) -> None:
    expected = {"llama": (0, 1), "mistral": (), "gemma3": (2,), "deepseek-v3": (0, 1), "qwen3-next": (1,), "mamba2": ()}

    assert {name: load_family(name).new_kv(1).token_layers for name in expected} == expected


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_a_model_that_keeps_every_token_has_no_state(
    name: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    kv = read(load_family(name), ids)

    assert kv.state() == {}
    assert load(encode_state(kv)) == {}


def test_a_layer_of_latent_attention_keeps_one_vector_for_all_heads(
    load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    kv = read(load_family("deepseek-v3"), ids)

    assert kv.keys[0].shape == (1, len(ids), 16)  # kv_lora_rank
    assert kv.values[0].shape == (1, len(ids), 8)  # qk_rope_head_dim


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_does_not_grow_with_the_document(
    name: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family(name)

    sizes = {len(encode_state(read(model, (ids * 2)[:length]))) for length in (100, 150, 300)}

    assert len(sizes) == 1


def test_a_window_holds_one_chunk_beside_itself_while_reading(
    load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    held = []

    def watch(kv: PrefixKV, start: int, stop: int) -> None:
        held.append({(window.base, window.stop) for window in kv.windows.values()})

    prefill(load_family("mistral"), ids, stops=[20, 30, 90, 91, 150], on_chunk=watch)

    assert held == [{(0, 20)}, {(0, 30)}, {(0, 90)}, {(91 - WINDOW, 91)}, {(92 - WINDOW, 150)}]


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 150])
def test_a_loaded_window_holds_what_the_next_token_sees(
    length: int, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family("mistral")
    kv = read(model, ids[:length])
    loaded = model.new_kv(length)

    loaded.set_state(length, kv.state())

    for layer in (0, 1):
        keys, values, base = loaded.layer(layer)
        assert base == max(0, length - WINDOW + 1)
        assert keys.shape[1] == values.shape[1] == length - base
    assert loaded.length == length


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_comes_back_bit_by_bit_and_equal_states_give_equal_bytes(
    name: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family(name)
    kv = read(model, ids)
    data = encode_state(kv)
    loaded = model.new_kv(len(ids))

    decode_state(data, loaded, len(ids), device="cpu")

    state = kv.state()
    assert state.keys() == loaded.state().keys() != set()
    assert all(torch.equal(tensor, state[tensor_name]) for tensor_name, tensor in loaded.state().items())
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert encode_state(loaded) == encode_state(kv) == data


def test_the_names_of_a_state_are_stable(load_family: Callable[[str], LanguageModel], ids: list[int]) -> None:
    assert read(load_family("gemma3"), ids).state().keys() == {
        "window.0.k",
        "window.0.v",
        "window.1.k",
        "window.1.v",
    }
    assert read(load_family("qwen3-next"), ids).state().keys() == {"recurrent.0.conv", "recurrent.0.ssm"}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_taken_while_reading_is_not_changed_by_what_is_read_next(
    name: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family(name)
    taken: list[dict[str, Tensor]] = []
    copies: list[dict[str, Tensor]] = []

    def take(kv: PrefixKV, start: int, stop: int) -> None:
        taken.append(kv.state())
        copies.append({part: tensor.clone() for part, tensor in taken[-1].items()})

    prefill(model, ids, stops=[50, 51, 149, 150], on_chunk=take)

    assert len(taken) == 4
    for state, content in zip(taken, copies, strict=True):
        assert all(torch.equal(state[part], content[part]) for part in content)


@pytest.mark.parametrize("name", STATEFUL)
def test_answering_leaves_the_documents_state_alone(
    name: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family(name)
    stored = Stored(model, ids)
    stored.read([*range(50, 150, 50), 150])
    kv = stored.load(150)
    params = GenerationParams(max_new_tokens=5, ignore_eos=True)
    requests = [DecodeRequest(key, ids[key : key + length], params, kv) for key, length in enumerate((3, 3, 1, 7))]

    class NoText:
        stop_ids: frozenset[int] = frozenset()

        def text(self, ids: list[int]) -> str:
            return ""

    first = list(Decoder(model, NoText(), max_batch=3).run(requests))  # type: ignore[arg-type]
    again = list(Decoder(model, NoText(), max_batch=3).run(requests))  # type: ignore[arg-type]

    assert [result.token_ids for result in first] == [result.token_ids for result in again]
    assert encode_state(kv) == stored.states[150]


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "dtype", "length"])
def test_a_state_that_does_not_fit_is_refused_whole(
    name: str, damage: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family(name)
    kv = read(model, ids)
    tensors, length = kv.state(), len(ids)
    part = sorted(tensors)[-1]
    if damage == "missing":
        del tensors[part]
    elif damage == "unknown":
        tensors["window.7.k"] = tensors[part].clone()
    elif damage == "shape":
        tensors[part] = tensors[part][..., :-1].contiguous()
    elif damage == "dtype":
        tensors[part] = tensors[part].to(torch.float16)
    else:
        length -= 1
    data = save(tensors, {OWN_KEY: '{"length":150}'})
    loaded = model.new_kv(150)

    with pytest.raises(ChunkMismatch):
        decode_state(data, loaded, length, device="cpu")

    assert loaded.length == 0
    assert not loaded.windows
    assert not loaded.recurrent


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nothing",
        save({}),
        save({}, {OWN_KEY: "{}"}),
        save({}, {OWN_KEY: "["}),
        save({}, {OWN_KEY: '{"length":0}'}),
    ],
)
def test_what_is_no_state_is_refused(data: bytes, load_family: Callable[[str], LanguageModel]) -> None:
    with pytest.raises(ChunkMismatch):
        decode_state(data, load_family("llama").new_kv(4), 4, device="cpu")


@pytest.mark.parametrize("name", STATEFUL)
def test_a_truncated_state_is_refused(name: str, load_family: Callable[[str], LanguageModel], ids: list[int]) -> None:
    data = encode_state(read(load_family(name), ids))

    for cut in (7, 40, len(data) // 2, len(data) - 1):
        with pytest.raises(ChunkMismatch):
            decode_state(data[:cut], load_family(name).new_kv(150), 150, device="cpu")


def test_a_state_of_another_model_is_refused(load_family: Callable[[str], LanguageModel], ids: list[int]) -> None:
    state = read(load_family("mistral"), ids).state()

    for other in ("llama", "lfm2"):
        with pytest.raises(ChunkMismatch):
            put_back(load_family(other), state, 150)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next", "mamba2"])
def test_a_kv_without_the_models_layout_is_not_asked(name: str, load_family: Callable[[str], LanguageModel]) -> None:
    model = load_family(name)

    with pytest.raises(ChunkMismatch, match="layout"):
        model.ask(PrefixKV(4, 4), model.new_suffix(1, 1), [[5]], [0])


@pytest.mark.parametrize("name", STATEFUL)
def test_a_kv_without_its_state_is_not_asked_and_not_read_on(
    name: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family(name)
    kv = model.new_kv(150)
    kv.length = 50

    with pytest.raises(ChunkMismatch, match=r"state|windows"):
        model.ask(kv, model.new_suffix(1, 1), [[5]], [0])
    with pytest.raises(ChunkMismatch, match=r"state|windows"):
        prefill(model, ids, stops=[50, 150], kv=kv)


def test_a_layer_that_was_never_filled_is_told(load_family: Callable[[str], LanguageModel]) -> None:
    with pytest.raises(ChunkMismatch, match="layer 1"):
        load_family("mistral").new_kv(4).layer(1)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama"])
def test_without_a_layout_every_token_is_kept_and_nothing_else_differs(
    name: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family(name)
    plain = PrefixKV(150)
    for start, stop in pairwise((0, 70, 150)):
        model.forward(PrefillStep(plain, start, stop - start), ids[start:stop], 1)
        plain.length = stop

    kept, narrow = (model.ask(kv, model.new_suffix(1, 3), [[5, 6, 7]], [0]) for kv in (plain, read(model, ids)))

    assert plain.state() == {}
    assert plain.token_layers == tuple(range(len(plain.keys)))
    assert (kept - narrow).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next", "falcon-h1", "mamba2", "deepseek-v3"])
def test_the_loss_of_a_model_with_a_state_is_measured_without_changing_it(
    name: str, load_family: Callable[[str], LanguageModel], ids: list[int]
) -> None:
    model = load_family(name)
    done = prefill(model, ids, stops=[100, 150])
    stored = Stored(model, ids)
    stored.read([100, 150])
    rounded = stored.load(150)
    for layer in rounded.token_layers:
        rounded.write(layer, 0, rounded.keys[layer].to(torch.float8_e4m3fn).float(), rounded.values[layer].clone())
    before = encode_state(done.kv), encode_state(rounded)

    loss = measure_loss(model, ids, exact=done.kv, stored=rounded, first=100)

    assert (encode_state(done.kv), encode_state(rounded)) == before
    assert (loss.logit_rel_error > 0) == bool(rounded.token_layers)
    check_probe(model, ids[-1], rounded, loss.probe)
    assert measure_loss(model, ids, exact=done.kv, stored=done.kv, first=100).probe == done.probe
