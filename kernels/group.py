"""Starting the processes that hold one model together, and their life."""

import json
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels.architecture import read_config
from kernels.cards import rank_environment
from kernels.device import pick_device
from kernels.errors import ModelError, ModelUnsupported, RankLost
from kernels.model import LanguageModel, load_model
from kernels.parallel import ParallelModel, kv_heads
from kernels.rank import Rank
from kernels.settings import KernelSettings

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "musa": "cpu:gloo,musa:mccl"}


def check_heads(name: str, config: Mapping[str, Any], count: int) -> None:
    """
    Raises:
        ModelUnsupported: the heads cannot be shared out evenly.
    """
    query = int(config.get("num_attention_heads") or 0)
    for kind, heads in (("attention", query), ("KV", kv_heads(config))):
        if heads % count or heads < count:
            raise ModelUnsupported(
                name,
                f"its {heads} {kind} heads cannot be shared out evenly among {count} ranks; "
                f"set PLATEMAKER_TENSOR_PARALLEL to a divisor of {heads}",
            )


def load_parallel(folder: Path, settings: KernelSettings) -> ParallelModel:
    """Starts a process for each other rank and loads the model in all of them. A process has one group at a time.

    Raises:
        ModelError: as `load_model`, or the model cannot be split so.
        RankLost: a rank ended while it loaded.
    """
    count = settings.tensor_parallel
    check_heads(folder.name, read_config(folder), count)
    if settings.adapter is not None:
        raise ModelUnsupported(
            folder.name, "an adapter cannot be merged into weights on several ranks; save the merged model with peft"
        )
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    with tempfile.TemporaryDirectory(prefix="platemaker-") as scratch:
        meeting = str(Path(scratch) / "group")
        for number in range(1, count):
            theirs, ours = context.Pipe(duplex=False)
            process = context.Process(
                target=_follow, args=(folder, settings, number, meeting, theirs), name=f"rank-{number}", daemon=True
            )
            with _environment(rank_environment(settings.cards, number)):
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            local = _join(folder, settings, 0, meeting)
            model = ParallelModel(
                local.hf,
                torch.device("cpu"),
                local.dtype,
                local.context_len,
                rank=Rank(local, 0, count),
                pipes=pipes,
                processes=processes,
            )
            _ = model.layout
        except BaseException as exc:
            lost = not all(process.is_alive() for process in processes)
            for process in processes:
                process.kill()
                process.join()
            if dist.is_initialized():
                dist.destroy_process_group()
            if lost and not isinstance(exc, ModelError):
                raise RankLost(count) from exc
            raise
    return model


def _join(folder: Path, settings: KernelSettings, number: int, meeting: str) -> LanguageModel:
    """Enters the group and loads this rank's part; every rank does the same at the same time."""
    device = pick_device(settings.device)
    found = torch._C._get_accelerator().type
    if found != device.type:
        raise ModelUnsupported(folder.name, f"transformers would split it over {found}, not {device.type}")
    count = settings.tensor_parallel
    # All ranks are on this machine: their sockets need not be seen from another.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    dist.init_process_group(
        BACKENDS.get(device.type, "gloo"), init_method=f"file://{meeting}", rank=number, world_size=count
    )
    model = load_model(folder, settings, ranks=count)
    _ = model.layout
    return model


def _follow(folder: Path, settings: KernelSettings, number: int, meeting: str, orders: Connection) -> None:
    """The life of a rank's process: obeys until there are no more orders, and never outlives rank 0's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the keyboard: rank 0 decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        rank = Rank(_join(folder, settings, number, meeting), number, settings.tensor_parallel)
    except ModelError:
        return  # rank 0 says the same
    while True:
        try:
            order = json.loads(orders.recv_bytes())
        except EOFError:
            break
        getattr(rank, order.pop("do"))(**order)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """For a process that is started inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
