import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import PlanError
from pipeline.planning.curves import cost_curve
from pipeline.planning.fast import plan_fast
from pipeline.planning.measure import Sample, profile_lines, rates
from pipeline.planning.mix import cheapest
from pipeline.planning.profiles import Device, load_profiles
from pipeline.planning.service import Cluster, decode_times, prefill_times
from pipeline.planning.simulate import simulate
from pipeline.planning.workload import Workload, draw_lengths, read_histogram

H20 = load_profiles().device("h20", "qwen2.5-7b")
S5000 = load_profiles().device("mtt-s5000", "qwen2.5-7b")


def a_night(documents: int, questions: int) -> Workload:
    return Workload(np.array([random.uniform(200, 60_000) for _ in range(documents)]), questions)


@pytest.mark.parametrize("readers", [0, 1, 5])
def test_the_fast_way_and_the_simulation_come_to_the_same(readers: int) -> None:
    cluster = Cluster(S5000, H20, readers, random.randint(1, 4))
    work = a_night(random.randint(1, 200), random.randint(1, 80))

    fast, simulated = plan_fast(cluster, work), simulate(cluster, work)

    assert asdict(fast) == pytest.approx(asdict(simulated), rel=1e-6)


def test_no_worker_is_busier_than_all_the_time_and_the_night_ends_no_sooner_than_its_work() -> None:
    cluster = Cluster(S5000, H20, 2, 3)
    found = plan_fast(cluster, a_night(100, 20))

    assert max(found.prefill_busy, found.decode_busy) <= 1 + 1e-9
    assert found.p50_s <= found.p95_s <= found.finish_s
    assert found.cost_is_device_hours
    assert found.cost == pytest.approx(5 * found.finish_s / 3600)


def test_the_cheapest_mix_meets_the_window() -> None:
    work = a_night(300, 10)
    alone = plan_fast(Cluster(S5000, H20, 1, 1), work).finish_s

    mix = cheapest(Cluster(S5000, H20, 0, 1, 1e12), work, alone / 3)

    assert mix.outcome.finish_s <= alone / 3
    assert mix.cluster.workers >= 2


@pytest.mark.parametrize(("store", "window_s"), [(1e3, 3600.0), (1e15, 1e-3)])
def test_what_no_number_of_workers_can_do_is_refused(store: float, window_s: float) -> None:
    with pytest.raises(PlanError):
        cheapest(Cluster(S5000, H20, 0, 1, store, store), a_night(20, 5), window_s)


def test_reading_once_costs_the_less_the_more_is_asked() -> None:
    full = [1, 2, 4, 8, 16, 32, 64]  # between full batches an answer may cost a little more
    curve = cost_curve(S5000, tokens=30_000, question_tokens=20, output_tokens=40, bytes_per_s=1e9, questions=full)

    assert list(curve.split_s) == sorted(curve.split_s, reverse=True)
    assert curve.split_pays_from is not None
    assert curve.shared_s[0] == pytest.approx(curve.one_piece_s[0], rel=0.01)
    slow = cost_curve(S5000, tokens=30_000, question_tokens=20, output_tokens=40, bytes_per_s=1e3)
    assert slow.split_pays_from is None


def test_lengths_are_drawn_in_the_shares_of_the_histogram(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,documents\n1000,5\n9000,3\n50000,2\n")
    documents = random.randint(1, 5000)

    drawn = draw_lengths(*read_histogram(path), documents)

    assert len(drawn) == documents
    for tokens, share in ((1000, 0.5), (9000, 0.3), (50000, 0.2)):
        assert abs((drawn == tokens).sum() - share * documents) <= 1


@pytest.mark.parametrize("text", ["pages,documents\n3,4\n", "tokens,documents\n10,0\n", "tokens,documents\n-1,2\n"])
def test_a_histogram_without_documents_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)

    with pytest.raises(PlanError):
        read_histogram(path)


def test_every_shipped_device_names_its_sources_and_a_measured_one_is_read_back(tmp_path: Path) -> None:
    shipped = load_profiles()
    assert all(entry["published"]["sources"] and entry["derived"] for entry in shipped.devices.values())
    measured = replace(H20, name="here", origin="measured", document_overhead_s=0.1)
    path = tmp_path / "mine.toml"
    path.write_text(profile_lines(measured))

    assert load_profiles(path).device("here", "any") == measured
    with pytest.raises(PlanError):
        shipped.device("here", "qwen2.5-7b")


@pytest.mark.parametrize("counts", [(16, 32), (1,)])
def test_rates_are_those_that_the_samples_were_made_with(counts: tuple[int, ...]) -> None:
    device = replace(
        H20,
        name="here",
        origin="measured",
        prefill_s_per_token=4e-4,
        prefill_s_per_token2=2e-8,
        step_s=0.012,
        step_s_per_row=3e-4,
        step_s_per_token=4e-6,
        step_s_per_row_token=1e-7,
        load_s_per_token=3e-5,
        document_overhead_s=0.05,
        answer_overhead_s=0.002,
    )
    noises = (-0.02, 0.0, 0.02)
    samples = [sample(device, rows, tokens, noise) for rows in counts for tokens in (256, 2048) for noise in noises]

    found = rates(samples, "here", question_tokens=30, kv_bytes_per_token=int(device.kv_bytes_per_token))

    if len(counts) == 2:
        assert replace(found, name="", origin="").__dict__ == pytest.approx(
            replace(device, name="", origin="").__dict__
        )
    for tokens in (256, 2048):
        assert seconds(found, counts[0], tokens) == pytest.approx(seconds(device, counts[0], tokens), rel=0.02)


def seconds(device: Device, rows: int, tokens: int) -> float:
    made = sample(device, rows, tokens, 0.0)
    return made.prefill_s + made.around_prefill_s + 16 * made.step_s + made.around_steps_s


def sample(device: Device, rows: int, tokens: int, noise: float) -> Sample:
    """What the plan has for such a document, whose bytes are taken to cost nothing by themselves."""
    work = Workload(np.array([float(tokens)]), rows, question_tokens=30, output_tokens=16)
    cluster = Cluster(device, device, 1, 1, store_bytes_per_s=1e18, worker_bytes_per_s=1e18)
    decode = decode_times(cluster, work)
    all_steps_s = 16 * (device.step_s + rows * device.step_s_per_row) + 16 * tokens * (
        device.step_s_per_token + rows * device.step_s_per_row_token
    )
    around_steps_s = float(decode.own_s[0]) + decode.shared_s(1) - all_steps_s
    read_s = device.prefill_s(tokens)
    return Sample(
        rows,
        tokens,
        read_s * (1 + noise),
        (float(prefill_times(cluster, work)[0]) - read_s) * (1 + noise),
        all_steps_s / 16 * (1 + noise),
        around_steps_s * (1 + noise),
    )
