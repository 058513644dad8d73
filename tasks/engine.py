"""The model of this process, loaded when first needed."""

import hashlib
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from importlib.metadata import version

import torch

from kernels.architecture import check_architecture, context_len, read_config
from kernels.codecs import CODECS, LAYOUT
from kernels.identity import ModelIdentity
from kernels.model import LanguageModel, load_model, model_folder, model_identity
from kernels.prefill import chunk_stops
from kernels.prompt import Prompter, ids_digest
from kernels.settings import KernelSettings
from storage.fingerprint import Fingerprint
from storage.manifest import Producer
from tasks.errors import WrongModel


class Engine:
    """Tokenizer, identity and weights of one model. Counting tokens does not load the weights."""

    def __init__(self, settings: KernelSettings) -> None:
        self.settings = settings
        self.name = settings.model_name
        self.lock = threading.RLock()  # one task at a time computes on the device

    @cached_property
    def prompter(self) -> Prompter:
        folder = model_folder(self.settings.model)
        check_architecture(self.name, read_config(folder))
        return Prompter(folder, self.settings.system_prompt, plain=self.settings.plain_prompt)

    @cached_property
    def context_len(self) -> int:
        return context_len(read_config(model_folder(self.settings.model)))

    @cached_property
    def identity(self) -> ModelIdentity:
        return model_identity(model_folder(self.settings.model), self.prompter, self.settings)

    @cached_property
    def model(self) -> LanguageModel:
        folder = model_folder(self.settings.model)
        if self.settings.tensor_parallel > 1:
            from kernels.group import load_parallel  # here: torch.distributed is of no use to a single rank

            return load_parallel(folder, self.settings)
        return load_model(folder, self.settings)

    @cached_property
    def producer(self) -> Producer:
        return Producer(version=version("platemaker"), device=str(self.model.hf.device), torch=torch.__version__)

    def fingerprint(self, tenant: str, document_id: str, prefix_ids: list[int]) -> Fingerprint:
        return Fingerprint(
            tenant=tenant,
            document_id=document_id,
            prefix_ids=ids_digest(prefix_ids),
            weights=self.identity.weights,
            config=self.identity.config,
            adapter=self.identity.adapter,
            tokenizer=self.identity.tokenizer,
            template=self.identity.template,
            kv_dtype=self.identity.kv_dtype,
            codec=self.settings.codec,
            layout=LAYOUT,
        )

    @cached_property
    def sha256(self) -> str:
        """Equal where snapshots are interchangeable: digest of the fingerprint but for tenant and document, and of the
        system prompt."""
        root = self.fingerprint("", "", []).chain_root()
        return hashlib.sha256(f"{root}\n{self.settings.system_prompt}".encode()).hexdigest()

    def chunk_stops(self, num_tokens: int) -> tuple[int, ...]:
        """Where the chunks of a prefix of this many tokens end."""
        return chunk_stops(num_tokens, self.prompter.head_tokens, self.settings.chunk_tokens)

    def reusable_tokens(self, stored: Sequence[int], num_tokens: int, states: Collection[int]) -> int:
        """How many of a prefix's tokens need not be computed, where the chunks that end at `stored` are there and
        behind some of them a state.

        What a lossy codec stored is never computed on, and the last chunk is always computed. A model with states goes
        on only behind one; that a model has none is guessed from their absence, since no weights are loaded for it.
        """
        usable = [stop for stop in stored if stop < num_tokens and (not states or stop in states)]
        return usable[-1] if usable and CODECS[self.settings.codec].lossless else 0

    def check_fingerprint(self, snapshot_id: int, fields: dict[str, str | int]) -> None:
        """
        Raises:
            WrongModel: the snapshot's numbers are not those of this engine.
        """
        own = self.fingerprint(str(fields["tenant"]), str(fields["document_id"]), []).fields()
        for name, value in own.items():
            if name != "prefix_ids" and fields.get(name) != value:
                raise WrongModel(snapshot_id, name)
