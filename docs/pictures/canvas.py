"""A picture as SVG: a card with a background of its own, so that it can be read on light and on dark pages."""

from xml.sax.saxutils import escape

INK, FAINT, LINE, CARD, EDGE = "#22262b", "#6a7078", "#9aa0a8", "#fbfaf7", "#d9d6cf"
# One colour a rank: fill, and a darker one for lines. They differ in lightness too, and every cell says in letters what it holds.
FILL = ["#8fc1e8", "#f5b971", "#8fd0a4", "#d9a5d6"]
DARK = ["#2f77b0", "#c0741a", "#2f8a50", "#97469a"]
PLAIN, FOLDED = "#ecebe6", "#fff4c2"


def number(value):
    """A coordinate, short and the same everywhere."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


class Canvas:
    """Collects shapes; sizes are in pixels."""

    def __init__(self, width, height, title, description):
        self.size, self.title, self.description = (width, height), title, description
        self.shapes, self.arrows = [], {}

    def add(self, name, text=None, **attributes):
        """One element; `_` in names stands for `-`."""
        words = "".join(
            f' {key.rstrip("_").replace("_", "-")}="{number(value) if isinstance(value, (int, float)) else escape(value)}"'
            for key, value in attributes.items()
        )
        self.shapes.append(f"<{name}{words}/>" if text is None else f"<{name}{words}>{escape(text)}</{name}>")

    def text(self, x, y, words, size=14, fill=INK, anchor="middle", weight="400"):
        """A line of text whose middle is at `y`."""
        self.add("text", words, x=x, y=y + size * 0.35, font_size=size, fill=fill, text_anchor=anchor, font_weight=weight)

    def box(self, x, y, width, height, fill=PLAIN, stroke=LINE, radius=5, dashed=False):
        """A rounded box."""
        dashes = {"stroke_dasharray": "4 4"} if dashed else {}
        self.add("rect", x=x, y=y, width=width, height=height, rx=radius, fill=fill, stroke=stroke, stroke_width=1.2, **dashes)

    def cell(self, x, y, width, height, label, owners=()):
        """A block of a buffer: in its rank's colour, striped where several are folded in it, empty where nobody cares."""
        owners = list(owners)
        self.box(x, y, width, height, fill=FILL[owners[0]] if len(owners) == 1 else FOLDED if owners else "#ffffff", dashed=not owners)
        if len(owners) > 1:
            share = (width - 8) / len(owners)
            for place, owner in enumerate(owners):
                self.add("rect", x=x + 4 + place * share, y=y + height - 7, width=share - 1, height=4, rx=1, fill=DARK[owner])
        self.text(x + width / 2, y + height / 2 - (2 if len(owners) > 1 else 0), label, size=13)

    def curve(self, start, end, colour, arrow=True, width=1.8):
        """A line that leaves and arrives level."""
        (x, y), (u, v) = start, end
        middle = (x + u) / 2
        path = f"M{number(x)} {number(y)} C{number(middle)} {number(y)} {number(middle)} {number(v)} {number(u)} {number(v)}"
        self.path(path, colour, arrow, width)

    def line(self, start, end, colour=FAINT, arrow=True, width=1.8):
        """A straight line."""
        (x, y), (u, v) = start, end
        self.path(f"M{number(x)} {number(y)} L{number(u)} {number(v)}", colour, arrow, width)

    def path(self, path, colour, arrow=True, width=1.8):
        """Any path, with a head in its own colour."""
        head = {}
        if arrow:
            self.arrows[colour] = f"head{len(self.arrows)}" if colour not in self.arrows else self.arrows[colour]
            head = {"marker_end": f"url(#{self.arrows[colour]})"}
        self.add("path", d=path, fill="none", stroke=colour, stroke_width=width, **head)

    def heads(self):
        """The heads of arrows, one for each colour in use."""
        shape = '<path d="M0 0 L8 4 L0 8 z" fill="{}"/>'
        return "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">{shape.format(colour)}</marker>'
            for colour, name in self.arrows.items()
        )

    def svg(self):
        """The whole file."""
        width, height = self.size
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(self.description)}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f"<defs>{self.heads()}</defs>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" fill="{CARD}" stroke="{EDGE}"/>',
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"
