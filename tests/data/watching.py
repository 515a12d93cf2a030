"""A watcher of preparations that remembers."""


class Silent:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.passes: list[tuple[str, int | None]] = []
        self.shown: tuple[int, ...] = ()

    def note(self, message: str) -> None:
        self.notes.append(message)

    def begin(self, what: str, total_bytes: int | None) -> None:
        self.passes.append((what, total_bytes))

    def show(self, *counts: int) -> None:
        self.shown = counts

    def end(self) -> None:
        pass
