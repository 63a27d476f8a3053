"""Set each card's power limit, within what the card allows, and read it back.

Run by a oneshot unit at every boot (limits are lost with the driver) and by the role. Cards are
named by UUID, since their order may change.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .run import Runner, run

#: What nvidia-smi is asked, in this order.
FIELDS = (
    "uuid", "name", "persistence_mode", "power.limit", "power.min_limit", "power.max_limit",
)  # fmt: skip
#: A limit reads back rounded to hundredths of a watt.
TOLERANCE_WATTS = 0.5


class PowerError(Exception):
    """The limits cannot be set; the text is one sentence for a person."""


@dataclass(frozen=True)
class Card:
    """One card as nvidia-smi reports it; a value in watts is ``None`` where the card has none."""

    uuid: str
    name: str
    persistence: bool
    limit: float | None
    minimum: float | None
    maximum: float | None


@dataclass(frozen=True)
class Target:
    """What one card should have.

    :ivar watts: the wish brought into the card's bounds; ``None`` when the card has no limit
    :ivar note: why it is not the wish itself
    """

    card: Card
    watts: float | None
    note: str = ""

    @property
    def settled(self) -> bool:
        """Whether nothing has to be done for this card."""
        if not self.card.persistence:
            return False
        if self.watts is None:
            return True
        return self.card.limit is not None and abs(self.card.limit - self.watts) < TOLERANCE_WATTS


def _watts(cell: str) -> float | None:
    """Read a cell that may be ``[N/A]`` or another word."""
    try:
        return float(cell)
    except ValueError:
        return None


def parse(text: str) -> list[Card]:
    """Parse ``nvidia-smi --query-gpu=FIELDS --format=csv,noheader,nounits``.

    Lines that are no rows (``No devices were found``) are left out.
    """
    cards = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(FIELDS) and cells[0].startswith("GPU-"):
            cards.append(
                Card(
                    cells[0], cells[1], cells[2].lower() == "enabled",
                    _watts(cells[3]), _watts(cells[4]), _watts(cells[5]),
                )
            )  # fmt: skip
    return cards


def read_cards(runner: Runner = run) -> list[Card]:
    """Ask nvidia-smi for every card.

    :raises PowerError: when it sees none
    """
    result = runner(
        ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"],
        timeout=60,
    )
    cards = parse(result.stdout)
    if not cards:
        lines = (result.stdout.strip() or result.stderr.strip()).splitlines()
        raise PowerError(f"nvidia-smi sees no card: {result.error or (lines or ['no output'])[0]}")
    return cards


def targets(
    cards: Sequence[Card], watts: float | None, devices: Mapping[str, float]
) -> list[Target]:
    """Bring the wish into each card's bounds.

    :param watts: wish for every card; ``None`` leaves the limit alone
    :param devices: wishes for single cards, by UUID
    :raises PowerError: names a UUID that no card has
    """
    unknown = sorted(set(devices) - {card.uuid for card in cards})
    if unknown:
        raise PowerError(
            f"gpu_power_devices names '{', '.join(unknown)}', which is no card of this host; "
            f"its cards are {', '.join(card.uuid for card in cards)}"
        )
    found = []
    for card in cards:
        wish = devices.get(card.uuid, watts)
        if wish is None:
            found.append(Target(card, None))
        elif card.limit is None:
            found.append(Target(card, None, "the card has no power limit to set"))
        elif card.maximum is not None and wish > card.maximum:
            note = f"{wish:g} W is above the card's {card.maximum:g} W"
            found.append(Target(card, card.maximum, note))
        elif card.minimum is not None and wish < card.minimum:
            note = f"{wish:g} W is below the card's {card.minimum:g} W"
            found.append(Target(card, card.minimum, note))
        else:
            found.append(Target(card, float(wish)))
    return found


def apply(found: Sequence[Target], runner: Runner = run) -> list[Card]:
    """Set what differs, then read everything back.

    :raises PowerError: names the card, the value set and the value read
    """
    for target in found:
        uuid = target.card.uuid
        if not target.card.persistence:
            # Without it the driver forgets the limit as soon as no program uses the card.
            _set(["-pm", "1"], uuid, "persistence mode", runner)
        if target.watts is not None and not target.settled:
            _set(["-pl", f"{target.watts:g}"], uuid, f"power limit {target.watts:g} W", runner)
    now = {card.uuid: card for card in read_cards(runner)}
    for target in found:
        card = now.get(target.card.uuid)
        if card is None:
            raise PowerError(f"card {target.card.uuid} is gone after its limit was set")
        if (
            target.watts is not None
            and card.limit is not None
            and abs(card.limit - target.watts) >= TOLERANCE_WATTS
        ):
            raise PowerError(
                f"card {card.uuid} was set to {target.watts:g} W but reads back {card.limit:g} W"
            )
    return list(now.values())


def _set(arguments: Sequence[str], uuid: str, what: str, runner: Runner) -> None:
    result = runner(["nvidia-smi", "-i", uuid, *arguments], timeout=60)
    if not result.ok:
        lines = (result.stdout.strip() or result.stderr.strip()).splitlines()
        reason = result.error or (lines or [f"status {result.rc}"])[-1]
        raise PowerError(f"{what} cannot be set on card {uuid}: {reason}")


def wait_for_cards(
    count: int,
    timeout: float,
    runner: Runner = run,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Card]:
    """Wait until the driver shows its cards (at boot it may still be loading).

    :param count: how many at least
    :raises PowerError: names how many there are
    """
    end = clock() + timeout
    while True:
        try:
            cards = read_cards(runner)
            reason = f"only {len(cards)} of {count} cards"
            if len(cards) >= count:
                return cards
        except PowerError as error:
            reason = str(error)
        if clock() >= end:
            raise PowerError(f"{reason} after {timeout:g} s")
        sleep(2.0)


def load(path: str) -> tuple[float | None, dict[str, float]]:
    """Read the settings file that the role writes.

    :raises PowerError: names the file and what is wrong
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        watts = data["limit_watts"]
        devices = {str(k): float(v) for k, v in data["devices"].items()}
        return (None if watts is None else float(watts)), devices
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PowerError(f"'{path}' cannot be used: {error}") from error


def main(argv: list[str]) -> int:
    """Run the verb ``gpu-power``: set the limits of the settings file, print one line a card."""
    parser = argparse.ArgumentParser(prog="vllm-turing-host gpu-power", description=__doc__)
    parser.add_argument("--config", default="/etc/vllm-turing/gpu-power.json")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the cards")
    parser.add_argument("--show", action="store_true", help="only print, as JSON")
    options = parser.parse_args(argv)
    try:
        watts, devices = load(options.config)
        cards = wait_for_cards(max(1, len(devices)), options.wait)
        found = targets(cards, watts, devices)
        if options.show:
            print(json.dumps([asdict(target) for target in found], indent=2))
            return 0
        now = apply(found)
    except PowerError as error:
        print(f"gpu-power: {error}", file=sys.stderr)
        return 1
    for card, target in zip(now, found, strict=False):
        limit = "no limit" if card.limit is None else f"{card.limit:g} W"
        print(f"{card.uuid} {card.name}: {limit}{f' ({target.note})' if target.note else ''}")
    return 0
