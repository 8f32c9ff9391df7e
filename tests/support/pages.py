"""The content of HTML pages."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements of a page, and its text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.elements, self._inside = "", list[tuple[str, dict[str, str | None]]](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data

    def list_values(self, *names: str) -> list[str]:
        """Return the values of attributes of these names."""
        return [value for _, attributes in self.elements for name in names if (value := attributes.get(name))]
