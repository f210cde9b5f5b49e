"""What each collective does to the buffers of four ranks: before on the left, after on the right."""

from canvas import Canvas, DARK, FAINT, INK

RANKS, CELL, ROW, HIGH, LEFT, GAP = 4, 44, 52, 34, 84, 170
LETTERS = "abcd"
EVERYONE = range(RANKS)


def own(rank, block=None):
    """A cell that a rank has filled."""
    return (LETTERS[rank] + ("" if block is None else str(block)), (rank,))


def fold(block=None):
    """A cell that holds the sum over all ranks."""
    return ("Σ" + ("" if block is None else str(block)), tuple(EVERYONE))


EMPTY = ("", ())


def flow(title, description, before, after, moves):
    """One picture; `before` and `after` are the cells of each rank, `moves` says who sends to whom."""
    wide = max(map(len, before)), max(map(len, after))
    right = LEFT + wide[0] * CELL + GAP
    width = right + wide[1] * CELL + 28
    canvas = Canvas(width, 70 + RANKS * ROW, title, description)
    canvas.text(24, 26, title, size=17, anchor="start", weight="600")
    canvas.text(LEFT + wide[0] * CELL / 2, 52, "before", size=12, fill=FAINT)
    canvas.text(right + wide[1] * CELL / 2, 52, "after", size=12, fill=FAINT)
    top = [66 + rank * ROW for rank in EVERYONE]
    for rank in EVERYONE:
        canvas.text(24, top[rank] + HIGH / 2, f"rank {rank}", size=13, fill=DARK[rank], anchor="start", weight="600")
    for sender, receiver in moves:
        start = (LEFT + len(before[sender]) * CELL + 5, top[sender] + HIGH / 2 + (receiver - 1.5) * 4)
        end = (right - 7, top[receiver] + HIGH / 2 + (sender - 1.5) * 5)
        canvas.curve(start, end, DARK[sender], width=1.6 if sender != receiver else 1.1)
    for rank in EVERYONE:
        for cells, x in ((before[rank], LEFT), (after[rank], right)):
            for place, (label, owners) in enumerate(cells):
                canvas.cell(x + place * CELL, top[rank], CELL - 3, HIGH, label, owners)
    return canvas


ALL = [(sender, receiver) for sender in EVERYONE for receiver in EVERYONE]


def broadcast():
    """From rank 0 to everyone."""
    return flow("broadcast, root 0", "Rank 0's buffer is copied to every rank.",
                [[own(0)], [EMPTY], [EMPTY], [EMPTY]], [[own(0)]] * RANKS, [(0, rank) for rank in EVERYONE])


def scatter():
    """A block for each rank."""
    return flow("scatter, root 0", "Rank 0 hands each rank its block of one buffer.",
                [[own(0, block) for block in EVERYONE], [EMPTY], [EMPTY], [EMPTY]], [[own(0, rank)] for rank in EVERYONE],
                [(0, rank) for rank in EVERYONE])


def gather():
    """Every rank's block to rank 0."""
    return flow("gather, root 0", "Rank 0 receives every rank's block, in rank order.",
                [[own(rank)] for rank in EVERYONE], [[own(rank) for rank in EVERYONE], [EMPTY], [EMPTY], [EMPTY]],
                [(rank, 0) for rank in EVERYONE])


def all_gather():
    """Every rank's block to everyone."""
    return flow("all_gather", "Every rank receives every rank's block, in rank order.",
                [[own(rank)] for rank in EVERYONE], [[own(rank) for rank in EVERYONE]] * RANKS, ALL)


def reduce():
    """The reduction on rank 0."""
    return flow("reduce, root 0", "Rank 0 ends with the reduction of all buffers; the others keep theirs.",
                [[own(rank)] for rank in EVERYONE], [[fold()]] + [[own(rank)] for rank in (1, 2, 3)], [(rank, 0) for rank in EVERYONE])


def all_reduce():
    """The reduction on every rank."""
    return flow("all_reduce", "Every rank ends with the reduction of all buffers.",
                [[own(rank)] for rank in EVERYONE], [[fold()]] * RANKS, ALL)


def reduce_scatter():
    """A block of the reduction for each rank."""
    return flow("reduce_scatter", "Each rank ends with its own block of the reduction of all buffers.",
                [[own(rank, block) for block in EVERYONE] for rank in EVERYONE], [[fold(rank)] for rank in EVERYONE], ALL)


def all_to_all():
    """A block from everyone for everyone."""
    return flow("all_to_all", "Block j of rank i goes to place i on rank j: a transposition.",
                [[own(rank, block) for block in EVERYONE] for rank in EVERYONE],
                [[own(sender, rank) for sender in EVERYONE] for rank in EVERYONE], ALL)


def send_recv():
    """Each to its right-hand neighbour."""
    return flow("send and recv round a ring", "Each rank sends to the next and receives from the one before.",
                [[own(rank)] for rank in EVERYONE], [[own((rank + 3) % RANKS)] for rank in EVERYONE],
                [(rank, (rank + 1) % RANKS) for rank in EVERYONE])


def barrier():
    """Nobody leaves before the last has come."""
    canvas = Canvas(560, 70 + RANKS * 40, "barrier", "No rank leaves the barrier before the last one has entered it.")
    canvas.text(24, 26, "barrier", size=17, anchor="start", weight="600")
    arrivals, leave, last = (190, 130, 330, 250), 372, 330
    canvas.text(last, 46, "the last one enters", size=12, fill=FAINT)
    canvas.text(500, 46, "time →", size=12, fill=FAINT)
    canvas.line((last, 56), (last, 62 + RANKS * 40), INK, arrow=False, width=1)
    for rank, arrival in enumerate(arrivals):
        y = 74 + rank * 40
        canvas.text(24, y, f"rank {rank}", size=13, fill=DARK[rank], anchor="start", weight="600")
        canvas.line((LEFT, y), (arrival, y), DARK[rank], arrow=False, width=5)
        if arrival < last:
            canvas.text((arrival + last) / 2, y - 9, "waits", size=11, fill=FAINT)
        canvas.add("path", d=f"M{arrival} {y} L{leave} {y}", stroke=DARK[rank], stroke_width=1.5, stroke_dasharray="3 4", fill="none")
        canvas.line((leave, y), (530, y), DARK[rank], width=3)
    return canvas


PICTURES = [broadcast, scatter, gather, all_gather, reduce, all_reduce, reduce_scatter, all_to_all, send_recv, barrier]
