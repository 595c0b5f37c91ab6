"""What may happen to a file behind a store's back: more kinds than are met, each by its name."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.support.faults.bad_pages import PAGE_BYTES, BadPages

# --- what is done to one file -------------------------------------------------------------------


def flip_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    written = max(1, len(content.rstrip(b"\0")))
    content[rng.randrange(written)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def garble(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    written = max(1, len(content.rstrip(b"\0")))
    at = rng.randrange(written)
    size = min(rng.choice([4, 64, 512]), len(content) - at)
    content[at : at + size] = rng.randbytes(size)
    path.write_bytes(content)


def zero_range(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = rng.randrange(max(1, len(content.rstrip(b"\0"))))
    size = min(rng.choice([20, 512, 4096]), len(content) - at)
    content[at : at + size] = bytes(size)
    path.write_bytes(content)


def zero_tail(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    written = max(1, len(content.rstrip(b"\0")))
    at = max(0, written - rng.choice([1, 100, 1000, 5000]))
    path.write_bytes(content[:at] + bytes(len(content) - at))


def zero_all(path: Path, rng: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(max(1, len(content)))])


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def lengthen(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.choice([bytes(100), b"x" * 20]))


def garbage(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def rename(path: Path, rng: random.Random) -> None:
    path.rename(path.with_name(path.name + rng.choice([".old", "~", "0"])))


def swap(path: Path, rng: random.Random) -> None:
    """With another of the same folder."""
    others = sorted(p for p in path.parent.iterdir() if p.is_file() and p != path)
    if not others:
        return delete(path, rng)
    other = rng.choice(others)
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def duplicate(path: Path, rng: random.Random) -> None:
    """Under the name of the next file of its row, or as somebody keeps a copy."""
    name = path.name
    number = int(name) + path.stat().st_size if name.isdecimal() else 0
    copy = f"{number:0{len(name)}d}" if number else f"{name}.copy"
    shutil.copyfile(path, path.with_name(copy))


ON_FILES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bit, garble, zero_range, zero_tail, zero_all, truncate, empty, lengthen, garbage, delete,
    rename, swap, duplicate,
)  # fmt: skip

# --- which file ---------------------------------------------------------------------------------


def _row(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.is_file() and p.stat().st_size)


def _first(paths: list[Path], rng: random.Random) -> list[Path]:
    return paths[:1]


def _last(paths: list[Path], rng: random.Random) -> list[Path]:
    """The last with something in it."""
    return [p for p in paths if any(p.read_bytes())][-1:]


def _any(paths: list[Path], rng: random.Random) -> list[Path]:
    return [rng.choice(paths)] if paths else []


WHICH = {"first": _first, "last": _last, "some": _any}
ROWS = {"log": "commitlog", "index": "index", "config": "config"}
SMALL = (
    *("checkpoint", "cometmq.json", "cometmq.epochs", "cometmq.heads", "abort", "lock"),
    *("cometmq.reserve", "cometmq.spare"),
)
FOLDERS = ("commitlog", "consumequeue", "index", "config", "consumequeue/rmq_sys_cometmq_state")


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _file_of_text(path: Path) -> None:
    path.write_text("mine")


class Damage:
    """One thing that happened; ``name`` tells its kind, ``paths`` what it changed. ``bad`` gets the
    pages that the disk cannot read from now on.
    """

    def __init__(
        self, root: Path, rng: random.Random, other: Path, older: Path | None, bad: BadPages
    ) -> None:
        self.root, self.rng, self.other, self.older, self.bad = root, rng, other, older, bad
        self.name, self.path = "", root
        self.other_path = root  # that was exchanged with it

    def strike(self) -> None:
        while not self.name:
            self.name, self.path = self.rng.choice(
                [self._file, self._file, self._file, self._whole]
            )()

    def _target(self) -> tuple[str, Path | None]:
        row = self.rng.choice(["log", "log", "queue", "state queue", "index", "config", "small"])
        if row == "small":
            path = self.root / self.rng.choice(SMALL)
            return path.name, path if path.is_file() and path.stat().st_size else None
        if row == "state queue":
            folder = self.root / "consumequeue/rmq_sys_cometmq_state/0"
        elif row == "queue":
            queues = sorted(
                p for p in self.root.glob("consumequeue/*/*") if "rmq_sys" not in str(p)
            )
            folder = self.rng.choice(queues) if queues else self.root / "none"
        else:
            folder = self.root / ROWS[row]
        which = self.rng.choice(sorted(WHICH))
        found = WHICH[which](_row(folder), self.rng)
        return f"{which} file of {row}", found[0] if found else None

    def _file(self) -> tuple[str, Path]:
        where, path = self._target()
        if path is None:
            return "", self.root
        if self.rng.random() < 0.2:
            return self._replaced(where, path)
        if self.rng.random() < 0.2:
            written = len(path.read_bytes().rstrip(b"\0")) or 1
            self.bad.spoil(path, self.rng.randrange(-(-written // PAGE_BYTES)))
            return f"unreadable page in {where}", path
        act = self.rng.choice(ON_FILES)
        act(path, self.rng)
        return f"{act.__name__} {where}", path

    def _replaced(self, where: str, path: Path) -> tuple[str, Path]:
        """By another store's file, or its own of before."""
        what, source = self.rng.choice([("another store's", self.other), ("an older", self.older)])
        stand_in = None if source is None else source / path.relative_to(self.root)
        if stand_in is None or not stand_in.is_file():
            return "", self.root
        shutil.copyfile(stand_in, path)
        return f"{what} {where}", path

    def _whole(self) -> tuple[str, Path]:
        """Folders, and files that nobody put there."""
        choice = self.rng.randrange(7)
        if choice == 0:
            folder = self.root / self.rng.choice(FOLDERS)
            if folder.is_dir():
                shutil.rmtree(folder)
                return f"delete folder {folder.name}", folder
        elif choice == 1:
            folder = self.root / self.rng.choice(FOLDERS)
            if folder.is_dir():
                (folder / "notes.txt").write_text("mine")
                return f"stranger in {folder.name}", folder / "notes.txt"
        elif choice == 2:
            names = ["abort", "cometmq.next", "cometmq.trash.1", "cometmq.json.tmp", "core"]
            path = self.root / self.rng.choice(names)
            if not path.exists():
                path.write_bytes(b"")
                return f"an empty {path.name}", path
        elif choice == 3:
            queues = sorted(self.root.glob("consumequeue/*/*"))
            if queues:
                queue = self.rng.choice(queues)
                shutil.rmtree(queue)
                return "delete a queue", queue
        elif choice == 4:
            return self._of_another_type()
        else:
            return self._exchanged()
        return "", self.root

    def _of_another_type(self) -> tuple[str, Path]:
        """A name that is there leads to something of another type."""
        rows = [*SMALL, *FOLDERS, "cometmq.timers", "lost", "cometmq.next"]
        files = sorted(p for p in self.root.rglob("*") if p.is_file() and p.parent != self.root)
        path = self.rng.choice([self.root / self.rng.choice(rows), *files[:1], *files[-1:]])
        if self.rng.random() < 0.5 and files:
            path = self.rng.choice(files)
        makes = [_pipe, _loop, _file_of_text if path.is_dir() else _folder]
        make = self.rng.choice(makes)
        where = path.name if path.parent == self.root else path.relative_to(self.root).parts[0]
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        elif not path.parent.is_dir():
            return "", self.root
        make(path)
        return f"{make.__name__[1:]} in place of {where}", path

    def _exchanged(self) -> tuple[str, Path]:
        """Files or folders of two queues or topics."""
        what = self.rng.choice(["consumequeue/*", "consumequeue/*/*", "consumequeue/*/*/0*"])
        found = sorted(self.root.glob(what))
        if len(found) < 2:
            return "", self.root
        one, other = self.rng.sample(found, 2)
        self.other_path = other
        aside = self.root / "aside"
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
        return f"exchange of {('topics', 'queues', 'queue files')[what.count('/') - 1]}", one
