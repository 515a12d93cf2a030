"""A watcher of preparations and encodings that remembers."""


class Silent:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.passes: list[tuple[str, int | None]] = []
        self.shown: tuple[int, ...] = ()

    def note(self, message: str) -> None:
        self.notes.append(message)

    def begin(self, what: str, total: int | None) -> None:
        self.passes.append((what, total))

    def show(self, *counts: int) -> None:
        self.shown = counts

    def show_images(self, *counts: int) -> None:
        self.shown = counts

    def end(self) -> None:
        pass
