"""A store's whole story: a random life, random damage, and an operator who obeys what is told.

``python -m tests.support.faults.witness SEED`` tells one; ``FIRST-LAST`` plays many.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

from click.testing import CliRunner

from cometmq.admin.store_cli import store_group
from cometmq.errors import CometError, MessageNotFound, StoreDamaged
from cometmq.member.state.opening import Opened
from cometmq.model import Position
from cometmq.store import layout
from tests.support.faults.bad_pages import BadPages
from tests.support.faults.witness_damage import Damage
from tests.support.faults.witness_life import BEGAN_MS, Life, Message, read, start
from tests.support.stores.small_stores import HOST, encoded

STEPS_MAX = 8  # that an operator takes before giving up
LOST_LINE = re.compile(r"lost: (\d+) messages from offset (\d+) on of queue (\d+) of (\S+?),")
PASSED_OVER = re.compile(r"the log is damaged from (\d+) to (\d+)")
NAMED = re.compile(r"messages? (\d+)(?: to (\d+))? of queue (\d+) of ([^\s,.]+)")
VALUED = re.compile(
    r"--(write-off) (\d+-\d+)"
    r"|--(accept-end|epoch|cut-at|hash-slots|index-entries|queue-file-bytes) (\d+)"
    r"|--(store-id) ([0-9a-f]{32}|new)\b"
    r"|--(rebuild-tables)()"
)
ELSEWHERE = re.compile(r"named file out|[Rr]emove (?:it|the|that)|[Mm]ove (?:it|the|that)")

# A topic without messages is nowhere but in the state: that the state goes is all there is to say.
STATE_LOSS_SAID = ("rebuilds topics, groups and committed offsets", "either is another store's")

PROBLEMS = (
    "silent loss",
    "dead end",
    "changed bytes",
    "traceback",
    "blind",  # verify finds no fault where something is lost
    "position",  # names another message than it did
    "wrong body",
    "false loss",  # named, and there
)

Place = tuple[str, int, int]


def _option(match: tuple[str, ...]) -> tuple[str, str]:
    """Name and value; of a flag the value is empty."""
    name, *value = filter(None, match)
    return name, value[0] if value else ""


class DeadEnd(Exception):
    """What was told does not lead to an open store."""


class NothingLeft(Exception):
    """No file of the log is there, and the operator was told so."""


class Story:
    """``problems`` is empty when all promises were kept."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed = seed
        self.root = root / "store"
        self.rng = random.Random(seed)
        self.life = Life(self.root, self.rng)
        self.problems: list[tuple[str, str]] = []  # kind, words
        self.lines: list[str] = []  # what happened
        self.kinds: list[str] = []  # of damage
        self.refusals = 0
        self.lost = 0  # synced messages that are gone, and were named
        self._said: set[Place] = set()
        # Named in a refusal, before the operator gave them up. A topic that was made again may
        # have the older one's message there, if its deletion is lost as well.
        self._named: set[Place] = set()
        # Of the log: where damage was told, and what was given up. What stood there is named too,
        # unless the damage has taken the queue with it.
        self._passed_over: list[tuple[int, int]] = []
        self._given_up: list[tuple[int, int]] = []
        self._struck: list[str] = []  # paths that were damaged
        self._options: dict[str, list[str]] = {}
        self._bad = BadPages()
        self._had_heads = False

    # --- the whole ----------------------------------------------------------------------------

    def play(self) -> Story:
        try:
            with self._listening(), self._bad.met():
                self.root.mkdir()
                self.life.play()
                self._tell(f"lived: {len(self.life.acknowledged())} messages in {self.life.topics}")
                self._strike()
                blind = not self._faults()
                opened = self._until_open()
                gone = self._judge(opened)
                synced = {m.place for m in self.life.acknowledged() if m.synced} & gone
                if synced and blind:
                    self._problem("blind", f"verify found no fault, but lost are {short(synced)}")
                opened.store.close()
                if faults := self._faults():
                    self._tell(f"faults that stay: {faults}")
                if not any(kind == "silent loss" for kind, _ in self.problems):
                    self._opens_again(gone)
        except NothingLeft:
            if any((self.root / "commitlog").glob("0*")):
                self._problem("dead end", "files of the log are there")
        except DeadEnd as end:
            self._problem("dead end", str(end))
        except Exception:
            self._problem("traceback", " / ".join(traceback.format_exc(limit=-2).split("\n")))
        return self

    def counts(self) -> Counter[str]:
        """What is to be summed up over many stories."""
        found = Counter(dict.fromkeys(PROBLEMS, 0))
        found.update({kind for kind, _ in self.problems})
        found.update(
            {"lives": 1, "refusals, obeyed": self.refusals, "messages lost, named": self.lost}
        )
        return found

    def _strike(self) -> None:
        self._had_heads = (self.root / layout.HEADS).exists()
        other = another(self.seed % 3)
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            damage = Damage(self.root, self.rng, other, self.life.older, self._bad)
            damage.strike()
            self.kinds.append(damage.name)
            self._struck.append(str(damage.path.relative_to(self.root)))
            if damage.other_path != self.root:
                self._struck.append(str(damage.other_path.relative_to(self.root)))
            self._tell(f"damage: {damage.name} ({damage.path.relative_to(self.root)})")

    def _opens_again(self, gone: set[Place]) -> None:
        opened = self._until_open()
        for message in self.life.acknowledged():
            if message.place not in gone and not self._is_there(opened, message)[0]:
                self._problem("silent loss", f"at the second start: {message.place}")
                break
        opened.store.close()

    # --- the operator -------------------------------------------------------------------------

    def _until_open(self) -> Opened:
        for _ in range(STEPS_MAX):
            before = hashes(self.root)
            try:
                opened = start(self.root, self.life.clock)
            except CometError as error:
                self._refused("start", before)
                self._obey(f"{error}\n{error.advice}")
            else:
                self.life.epoch = max(self.life.epoch, opened.store.epoch)
                return opened
        raise DeadEnd(f"not open after {STEPS_MAX} steps")

    def _refused(self, what: str, before: dict[str, str]) -> None:
        self.refusals += 1
        after = hashes(self.root)
        changed = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
        if changed:
            self._problem("changed bytes", f"{what} refused and changed {changed[:5]}")

    def _obey(self, text: str) -> None:
        """Do what is written there."""
        self._tell(f"told: {text}")
        for first, last, queue_id, topic in NAMED.findall(text):
            places = range(int(first), int(last or first) + 1)
            self._named.update((topic, int(queue_id), at) for at in places)
        valued = [_option(m) for m in VALUED.findall(text)]
        if "--epoch" in text and ("--epoch NUMBER" in text or "give --epoch" in text):
            valued = [v for v in valued if v[0] != "epoch"] + [("epoch", str(self.life.epoch + 1))]
        if "--store-id" in text and not any(v[0] == "store-id" for v in valued):
            valued.append(("store-id", "new"))
        elif said := re.search(r"names ([0-9a-f]{32})", text):
            valued = [v for v in valued if v[0] != "store-id"] + [("store-id", said[1])]
        if valued or "store repair" in text:
            for name in {name for name, _ in valued}:
                self._options[name] = [value for n, value in valued if n == name]
            return self._repair()
        if ELSEWHERE.search(text):
            return self._move_out(text)
        raise DeadEnd(f"no way on is named: {text}")

    def _move_out(self, text: str) -> None:
        named = [Path(word.rstrip(".,:;")) for word in text.split() if str(self.root) in word]
        for path in named:
            if os.path.lexists(path) and path != self.root:
                self._tell(f"moved out {path.relative_to(self.root)}")
                shutil.move(path, tempfile.mkdtemp(dir=self.root.parent))
                return
        raise DeadEnd(f"no file is named: {text}")

    def _repair(self) -> None:
        words = ["repair", str(self.root), "--output", "json"]
        for name, values in self._options.items():
            words += [word for value in values for word in (f"--{name}", value) if word]
        before = hashes(self.root)
        done = CliRunner().invoke(store_group, words)
        self._tell(f"cometmq store {' '.join(words)} -> {done.exit_code}")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            self._refused("repair", before)
            refusal = json.loads(done.stderr)["error"]
            self._more_options(f"{refusal['message']}\n{refusal['advice']}")
            return
        said = json.loads(done.stdout)
        self._tell(f"repaired: {said['actions']} losses {said['losses']}")
        for loss in said["losses"]:
            first = loss["first_queue_offset"]
            for offset in range(first, first + loss["message_count"]):
                self._said.add((loss["topic"], loss["queue_id"], offset))
        for given in self._options.get("write-off", ()):
            low, high = given.split("-")
            self._given_up.append((int(low), int(high)))
        self._given_up += [(int(end), 1 << 62) for end in self._options.get("accept-end", ())]
        self._options.clear()

    def _more_options(self, text: str) -> None:
        before = dict(self._options)
        depth = sum(line.startswith("told") for line in self.lines)
        if depth > STEPS_MAX:
            raise DeadEnd(f"repair goes on refusing: {text}")
        if "a member that has nothing left starts on an empty folder" in text:
            raise NothingLeft
        named = VALUED.search(text) or "--epoch" in text or "--store-id" in text
        if not named and not ELSEWHERE.search(text):
            raise DeadEnd(f"repair refuses and names no way on: {text}")
        self._obey(text) if named else self._move_out(text)
        assert before is not None

    # --- the judge ----------------------------------------------------------------------------

    def _judge(self, opened: Opened) -> set[Place]:
        """Compare what was acknowledged with what is there. The places that are gone."""
        if self._is_anothers():
            return {message.place for message in self.life.acknowledged()}
        gone: set[Place] = set()
        if self.life.was_rocketmqs and any("another program was here" in o for o in self.lines):
            # RocketMQ's retention removes files, as a hand would.
            self._passed_over.append((0, opened.store.min_offset))
        silent: list[Place] = []
        missing = sorted(t for t in self.life.topics if t not in opened.state.topics)
        said = any(words in line for line in self.lines for words in STATE_LOSS_SAID)
        if missing and not said and not any(line.startswith("ERROR") for line in self.lines):
            self._problem("silent loss", f"no topic {missing}")
        for message in self.life.acknowledged():
            there, told = self._is_there(opened, message)
            if there:
                if message.place in self._said and not self._is_exchanged(message):
                    self._problem("false loss", f"{message.place} is there")
                continue
            gone.add(message.place)
            if told or self._is_said(message):
                self.lost += 1
            elif message.synced:
                silent.append(message.place)
            else:
                self._tell(f"gone, never synced: {message.place}")
        if silent:
            self._problem("silent loss", short(silent))
        self._send_more(opened)
        self._check_positions(opened)
        return gone

    def _is_exchanged(self, message: Message) -> bool:
        """Whether its queue had another one's files: repair names what these name."""
        return any("exchange" in kind for kind in self.kinds) and any(
            f"consumequeue/{message.topic}/{message.queue_id}/".startswith(f"{path}/")
            or f"{path}/".startswith(f"consumequeue/{message.topic}/{message.queue_id}/")
            for path in self._struck
        )

    def _is_said(self, message: Message) -> bool:
        """Whether its loss was told: by its name, or by its place where no queue told its name."""
        queue = f"consumequeue/{message.topic}/{message.queue_id}/"
        ranges = list(self._passed_over)
        if any(
            f"{path}/".startswith(queue) or queue.startswith(f"{path}/") for path in self._struck
        ):
            ranges += self._given_up
        return message.place in self._said | self._named or any(
            start <= message.log_offset < end for start, end in ranges
        )

    def _is_anothers(self) -> bool:
        """The log is another store's, and there was no mark yet that could tell, nor what its files
        began with: see docs/reliability.md.
        """
        swapped = any("another store's" in kind and "of log" in kind for kind in self.kinds)
        return (
            swapped
            and not self._had_heads
            and any("from 0 on: without a checkpoint" in line for line in self.lines)
        )

    def _is_there(self, opened: Opened, message: Message) -> tuple[bool, bool]:
        """Whether it is there, and, if not, whether its reader is told of a loss."""
        if message.topic not in opened.state.topics:
            return False, False
        try:
            found = read(opened.store, *message.place)
        except (StoreDamaged, MessageNotFound):
            return False, True
        except LookupError:
            return False, False
        if found.body != message.body:
            # Where the deletion of a topic was lost, with its successor, the old one is back.
            if message.place not in self._said | self._named:
                self._problem("wrong body", f"{message.place}: {found.body[:20]!r}")
            return False, False
        return True, False

    def _send_more(self, opened: Opened) -> None:
        for config in opened.state.topics:
            for queue_id in range(config.write_queue_count):
                if config.name in self.life.topics:
                    more = [encoded(config.name, queue_id, b"new") for _ in range(3)]
                    claim = (config.name, queue_id, len(more))
                    opened.store.append(b"".join(more), [claim], born_host=HOST, store_host=HOST)

    def _check_positions(self, opened: Opened) -> None:
        """A position that somebody holds names the message that it named, or is refused."""
        wrong = []
        for message in self.life.positions:
            history = opened.state.generations.find(message.topic, message.queue_id)
            place = Position(message.generation, message.queue_offset)
            if history is None or history.fence(place) is not None:
                continue
            fenced_here = any(
                generation > message.generation and start <= message.queue_offset
                for generation, start in history.pairs
            )
            if fenced_here:
                continue
            try:
                found = read(opened.store, *message.place)
            except (LookupError, CometError):
                continue
            if found.body != message.body:
                wrong.append(message.place)
        if wrong:
            self._problem("position", f"names another message: {short(wrong)}")

    # --- what is told -------------------------------------------------------------------------

    def _faults(self) -> list[str]:
        before = hashes(self.root)
        done = CliRunner().invoke(store_group, ["verify", str(self.root), "--output", "json"])
        if hashes(self.root) != before:
            self._problem("changed bytes", "verify")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code == 1:
            return [json.loads(done.stderr)["error"]["message"]]
        return [str(fault) for fault in json.loads(done.stdout)["faults"]]

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """To the lines of the log."""
        story, logger = self, logging.getLogger("cometmq")

        class Listener(logging.Handler):
            def emit(self, entry: logging.LogRecord) -> None:
                story._hear(entry.levelname, entry.getMessage())

        listener, level, propagate = Listener(), logger.level, logger.propagate
        logger.addHandler(listener)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(listener)
            logger.setLevel(level)
            logger.propagate = propagate

    def _hear(self, level: str, line: str) -> None:
        if self.kinds:
            self._tell(f"{level} {line}")
            if place := PASSED_OVER.search(line):
                self._passed_over.append((int(place[1]), int(place[2])))
            if lost := LOST_LINE.search(line):
                count, first, queue_id = int(lost[1]), int(lost[2]), int(lost[3])
                self._said.update((lost[4], queue_id, at) for at in range(first, first + count))

    def _tell(self, line: str) -> None:
        self.lines.append(line.replace(str(self.root), "STORE"))

    def _problem(self, kind: str, words: str) -> None:
        self.problems.append((kind, words.replace(str(self.root), "STORE")))
        self._tell(f"PROBLEM {kind}: {words}")


def hashes(root: Path) -> dict[str, str]:
    """Each file's content, and what else there is; the lock is whose process is there."""
    return {
        str(path.relative_to(root)): hashlib.sha1(path.read_bytes()).hexdigest()
        if path.is_file()
        else f"{path.lstat().st_mode:o}"
        for path in root.rglob("*")
        if path.name != "lock"
    }


def short(places: list[Place] | set[Place]) -> str:
    found = sorted(places)
    return f"{len(found)}: {found[:3]}{'…' if len(found) > 3 else ''}"


@cache
def another(number: int) -> Path:
    """The folder of another store, which has lived too."""
    root = Path(tempfile.mkdtemp(prefix="witness-")) / "store"
    atexit.register(shutil.rmtree, root.parent)
    root.mkdir()
    # Stores that began in the same millisecond at the same address would have the same first bytes.
    Life(root, random.Random(f"another {number}"), BEGAN_MS - 86_400_000).play()
    return root


def play(seed: int) -> Story:
    """The process alone dies in these stories, and what was written outlives it: no sync is
    needed.
    """
    ids = random.Random(seed)  # else the same life would not have the same bytes
    with (
        tempfile.TemporaryDirectory(prefix="witness-") as scratch,
        patch("os.fsync"),
        patch("os.fdatasync"),
        patch("uuid.uuid4", lambda: UUID(int=ids.getrandbits(128))),
    ):
        return Story(seed, Path(scratch)).play()


def main(seeds: str) -> None:
    first, _, last = seeds.partition("-")
    counted: Counter[str] = Counter()
    for seed in range(int(first), int(last or first) + 1):
        story = play(seed)
        counted.update(story.counts())
        if not last:
            print("\n".join(story.lines))
        for kind, words in story.problems:
            print(seed, kind, "|", ", ".join(story.kinds), "|", words, flush=True)
    print(dict(counted))


if __name__ == "__main__":
    main(sys.argv[1])
