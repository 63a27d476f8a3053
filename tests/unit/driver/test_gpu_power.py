"""Limits per card, by UUID, within the card's bounds, read back (case 16's cells too)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import gpu_power
from vllm_turing.gpu_power import PowerError
from vllm_turing.run import Result

A = "GPU-11111111-2222-3333-4444-555555555555"
B = "GPU-66666666-7777-8888-9999-000000000000"


class Cards:
    """nvidia-smi for cards that keep what they are told, within what they obey."""

    def __init__(self, *limits: float | None, deaf: bool = False) -> None:
        self.limits = dict(zip((A, B), limits, strict=False))
        self.persistence = dict.fromkeys(self.limits, "Disabled")
        self.deaf = deaf
        self.set: list[list[str]] = []

    def __call__(self, argv: Sequence[str], **_options: Any) -> Result:
        words = list(argv)
        if words[1].startswith("--query-gpu="):
            rows = ""
            for uuid, limit in self.limits.items():
                cell = "[N/A]" if limit is None else f"{limit:.2f}"
                bounds = "[N/A], [N/A]" if limit is None else "100.00, 280.00"
                mode = self.persistence[uuid]
                rows += f"{uuid}, NVIDIA GeForce RTX 2080 Ti, {mode}, {cell}, {bounds}\n"
            return Result(tuple(words), 0, rows + "\n")
        self.set.append(words[3:])
        if words[3] == "-pm":
            self.persistence[words[2]] = "Enabled"
        elif not self.deaf:
            self.limits[words[2]] = float(words[4])
        return Result(tuple(words), 0)


def test_every_card_gets_the_limit_and_a_second_time_changes_nothing() -> None:
    cards = Cards(250, 250)
    gpu_power.apply(gpu_power.targets(gpu_power.read_cards(cards), 200, {}), cards)
    assert cards.limits == {A: 200.0, B: 200.0}
    assert set(cards.persistence.values()) == {"Enabled"}
    cards.set.clear()
    found = gpu_power.targets(gpu_power.read_cards(cards), 200, {})
    assert all(target.settled for target in found)
    gpu_power.apply(found, cards)
    assert cards.set == []


def test_a_single_card_by_its_uuid() -> None:
    found = gpu_power.targets(gpu_power.read_cards(Cards(250, 250)), 200, {B: 180})
    assert [target.watts for target in found] == [200, 180]


@pytest.mark.parametrize(
    ("wish", "watts", "note"),
    [
        (400, 280, "400 W is above the card's 280 W"),
        (50, 100, "50 W is below the card's 100 W"),
        (280, 280, ""),
    ],
)
def test_the_cards_own_bounds_hold(wish: float, watts: float, note: str) -> None:
    (target,) = gpu_power.targets(gpu_power.read_cards(Cards(250)), wish, {})
    assert (target.watts, target.note) == (watts, note)


def test_a_card_without_a_limit_is_left_alone() -> None:
    cards = Cards(None)
    (target,) = gpu_power.targets(gpu_power.read_cards(cards), 200, {})
    assert target.watts is None
    gpu_power.apply([target], cards)
    assert cards.set == [["-pm", "1"]]


def test_a_limit_that_does_not_read_back_is_an_error() -> None:
    cards = Cards(250, deaf=True)
    with pytest.raises(PowerError, match=f"{A} was set to 200 W but reads back 250 W"):
        gpu_power.apply(gpu_power.targets(gpu_power.read_cards(cards), 200, {}), cards)


def test_a_uuid_that_no_card_has_lists_the_cards() -> None:
    with pytest.raises(PowerError, match=f"names 'GPU-x', .* its cards are {A}"):
        gpu_power.targets(gpu_power.read_cards(Cards(250)), 200, {"GPU-x": 100})


@pytest.mark.parametrize(
    "answer",
    [
        Result((), 0, "No devices were found\n"),
        Result((), 9, "NVIDIA-SMI has failed because it couldn't communicate with the driver.\n"),
        Result((), None, error="timed out after 60 s"),
        Result((), 0, ""),
    ],
)
def test_no_card_is_an_error_and_no_row(answer: Result) -> None:
    with pytest.raises(PowerError, match="nvidia-smi sees no card"):
        gpu_power.read_cards(lambda *_args, **_options: answer)


def test_it_waits_for_cards_that_come_late() -> None:
    now = [0.0]
    late = Cards(250, 250)

    def runner(argv: Sequence[str], **options: Any) -> Result:
        if now[0] < 6:
            return Result(tuple(argv), 0, "No devices were found\n")
        return late(argv, **options)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    cards = gpu_power.wait_for_cards(2, 60, runner, sleep=sleep, clock=lambda: now[0])
    assert len(cards) == 2
    with pytest.raises(PowerError, match="only 2 of 3 cards after 10 s"):
        gpu_power.wait_for_cards(3, 10, runner, sleep=sleep, clock=lambda: now[0])


@pytest.mark.parametrize("text", ["", "[]", '{"limit_watts": "x", "devices": {}}', "{}"])
def test_a_damaged_settings_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu-power.json"
    path.write_text(text)
    with pytest.raises(PowerError, match=f"'{path}' cannot be used"):
        gpu_power.load(str(path))
    path.write_text(json.dumps({"limit_watts": None, "devices": {A: "180"}}))
    assert gpu_power.load(str(path)) == (None, {A: 180.0})
