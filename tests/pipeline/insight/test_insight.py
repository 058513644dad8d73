import io
import json
import random
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.errors import BaselineFailed
from pipeline.insight.advise import Asked, advise, probe_store
from pipeline.insight.baseline import measure_baseline
from pipeline.insight.baseline_table import print_baseline, print_change
from pipeline.insight.costs import Prices, charges
from pipeline.insight.monitor import View, look, screen
from pipeline.insight.percentiles import spread
from pipeline.insight.plots import plot_counts, plot_spreads
from storage.break_even import SplitRates
from storage.charges import Usage
from storage.database import Database
from storage.objects import FolderStore
from storage.settings import StorageSettings
from tasks.engine import Engine
from tests.storage.made_rows import claim, submit


def test_a_charge_is_the_sum_of_its_parts_and_lines_add_up() -> None:
    used = Usage(
        10, 100, 10_000, 200, 1000, prefill_s=20, decode_s=10, load_s=6, loaded_bytes=10**9, stored_bytes=10**9
    )
    prices = Prices(device_hour=36.0, gb_month=1.0, gb_transferred=0.5, hosted_input=1.0, hosted_output=10.0)

    (one, _), total = charges({"a": used, "b": used}, prices)

    assert one.device == pytest.approx(0.36)
    assert one.total == pytest.approx(0.36 + 1.0)
    assert one.reading_every_time == pytest.approx((10_000 * 20 / 1000 + 10) * 0.01)
    assert one.hosted == pytest.approx((10_100 + 2000) / 1e6)
    assert total.total == pytest.approx(2 * one.total)
    assert charges({"a": used}, Prices())[1].total is None


@pytest.mark.parametrize(
    ("asked", "get_bytes_per_s", "way"),
    [
        (Asked(1000, 1), 1e9, "one piece"),
        (Asked(1000, 20), 1e9, "prefix sharing within a task"),
        (Asked(1000, 20, 10), 1e9, "split with stored snapshots"),
        (Asked(1000, 20, 10), 1e3, "prefix sharing within a task"),
    ],
)
def test_the_advice_is_the_way_that_takes_least(asked: Asked, get_bytes_per_s: float, way: str) -> None:
    rates = SplitRates(500.0, 1e9, get_bytes_per_s, 20_000.0)

    (found,) = advise([asked], rates)

    assert found.recommendation == way
    assert found.break_even is not None
    tokens = asked.tokens
    at, under = found.break_even, found.break_even - 1
    split = rates.read_s(tokens) + rates.put_s(tokens) + rates.get_s(tokens)
    assert under * rates.read_s(tokens) <= split < at * rates.read_s(tokens)


def test_probing_a_store_leaves_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)

    assert min(probe_store(store, repeats=1)) > 0
    assert list(store.keys()) == []


def test_the_median_lies_between_the_least_and_the_most() -> None:
    values = [random.random() for _ in range(random.randint(1, 50))]
    found = spread(values)

    assert found is not None
    assert found.least <= found.p50 <= found.p95 <= found.most
    assert spread([]) is None


@pytest.fixture
def view(tmp_path: Path) -> View:
    with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
        database.upgrade()
        for number in range(30):
            submit(database, title=f"Night {number} with quite a long title for a screen", questions=40)
        claim(database, "worker-1", limit=7)
        return look(database, "acme")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_the_monitor_fits_its_screen(view: View, width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(screen(view, width, height))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()

    assert len(lines) <= height - 1
    assert all(len(line.rstrip()) <= width for line in lines)
    assert any("more" in line for line in lines) == (height < 30)  # else all 30 jobs have room


def test_the_monitor_says_for_programs_what_it_shows(view: View) -> None:
    record = json.loads(json.dumps(view.record()))

    assert record["running"] == 7
    assert record["queues"]["read"]["items"] == 30 * 40 - 7
    assert len(record["jobs"]) == 30


def test_both_ways_give_the_same_answers_in_float32(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(KernelSettings(model=str(tiny_model), device="cpu", dtype="float32", threads=1))
    params = GenerationParams(max_new_tokens=4)

    found = measure_baseline(engine, "The fee is due.", ["What is due?", "When?"], params, runs=1)

    assert found.equal_answers == 2
    record = json.loads(json.dumps(found.record()))
    assert "answers" not in record["split"]
    console = Console(file=io.StringIO(), width=90)
    print_baseline(console, found)
    print_change(console, found, record)
    assert isinstance(console.file, io.StringIO)
    assert "2 of 2 answers are equal" in console.file.getvalue()
    with pytest.raises(BaselineFailed):
        measure_baseline(engine, "The fee is due.", ["What?"], GenerationParams(max_new_tokens=4090), runs=1)


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "ways.svg"

    plot_spreads({"total": {"one piece": [3.0, 4.0], "split": [1.0, 2.0]}}, path, title="Both ways")

    assert path.read_text().lstrip().startswith("<?xml")


def test_counts_are_drawn_with_a_name_for_each_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "counts.svg"

    plot_counts({"wall": {1000: 2.0, 5000: 1.5}, "processor": {1000: 3.0}}, path, title="Cost", x="items", y="ms")

    assert all(text in path.read_text() for text in ("wall", "processor", "1,000", "5,000"))
