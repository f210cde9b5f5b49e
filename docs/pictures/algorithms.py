"""How calls work: in shared memory, between hosts, and on devices."""

from canvas import CARD, Canvas, DARK, FAINT, FILL, FOLDED, INK, LINE, PLAIN


def headed(width, height, title, description):
    """A canvas with its title on it."""
    canvas = Canvas(width, height, title, description)
    canvas.text(24, 26, title, size=17, anchor="start", weight="600")
    return canvas


def slots():
    """One step of a collective in shared memory."""
    canvas = headed(720, 300, "one step in shared memory", "Each rank writes its slot, publishes the step in its flag, waits for all flags, reads all slots.")
    canvas.box(232, 48, 256, 226, fill="#f1f5f9", radius=8)
    canvas.text(360, 64, "the region that the host's ranks share", size=12, fill=FAINT)
    for rank, y in enumerate((84, 182)):
        canvas.box(20, y, 150, 78, fill=CARD)
        canvas.text(95, y + 16, f"rank {rank}", size=13, fill=DARK[rank], weight="600")
        canvas.box(34, y + 32, 122, 34, fill=FILL[rank])
        canvas.text(95, y + 49, "its buffer", size=13)
        canvas.box(250, y, 96, 32, fill=FILL[rank])
        canvas.text(298, y + 16, f"slot A of {rank}", size=12)
        canvas.box(250, y + 42, 96, 32, fill="#ffffff", dashed=True)
        canvas.text(298, y + 58, "slot B", size=12, fill=FAINT)
        canvas.box(380, y + 10, 92, 50, fill=FOLDED)
        canvas.text(426, y + 26, f"flag of {rank}: s", size=12, weight="600")
        canvas.text(426, y + 45, "fingerprint", size=11, fill=FAINT)
        canvas.box(560, y + 20, 140, 38, fill=FOLDED)
        canvas.text(630, y + 39, "both slots reduced", size=12)
        canvas.line((170, y + 44), (246, y + 20), DARK[rank])
        canvas.line((346, y + 16), (377, y + 30), DARK[rank])
        for other, theirs in enumerate((84, 182)):
            canvas.curve((474, theirs + 35), (557, y + 33 + other * 12), DARK[other], width=1.3)
    for x, words in ((207, "1 copy in"), (362, "2 publish"), (516, "3 wait for all"), (630, "4 read in rank order")):
        canvas.text(x, 288, words, size=12, fill=INK)
    return canvas


def doubling():
    """Recursive doubling among eight."""
    canvas = headed(660, 330, "recursive doubling: log₂ n rounds", "In round k each rank exchanges everything it has with the rank at distance 2 to the k.")
    x = [150 + 66 * rank for rank in range(8)]
    for row in range(4):
        y = 74 + row * 76
        for rank in range(8):
            group = rank >> row << row
            held = f"{group}" if row == 0 else f"{group}–{group + (1 << row) - 1}"
            canvas.box(x[rank] - 24, y - 15, 48, 30, fill=PLAIN if row == 0 else FILL[row])
            canvas.text(x[rank], y, held, size=13)
            if row < 3:
                partner = rank ^ (1 << row)
                colour = DARK[row + 1]
                canvas.line((x[rank], y + 17), (x[partner], y + 58), colour, width=1.5)
                canvas.line((x[rank], y + 17), (x[rank], y + 58), LINE, arrow=False, width=1)
        label = "each its own" if row == 0 else f"after round {row}"
        canvas.text(24, y, label, size=12, fill=FAINT, anchor="start")
    return canvas


def ring():
    """All-reduce round a ring, as reduce-scatter and all-gather."""
    canvas = headed(720, 318, "ring: 2(n−1) hops of 1/n of the vector", "Shares travel around the ring and are reduced on the way; then the complete shares travel around once more.")
    for phase, (left, title) in enumerate(((84, "reduce-scatter: reduce on the way"), (404, "all-gather: pass on what is complete"))):
        canvas.text(left + 140, 54, title, size=13, weight="600")
        for step in range(4):
            canvas.text(left + 32 + step * 72, 76, "start" if step == 0 else f"hop {step}", size=11, fill=FAINT)
        for rank in range(4):
            for step in range(4):
                block = (rank - step - (1 if phase == 0 else 0)) % 4
                folded = step + 1 if phase == 0 else 4
                label = "Σ" + str(block) if folded == 4 else "+".join("abcd"[(block + 1 + k) % 4] for k in range(folded)) + f" {block}"
                x, y = left + step * 72, 90 + rank * 54
                owners = [(block + 1 + k) % 4 for k in range(folded)]
                canvas.cell(x, y, 64, 36, label, owners)
                if step < 3 and rank < 3:
                    canvas.line((x + 58, y + 37), (x + 78, y + 52), DARK[rank], width=1.4)
    for rank in range(4):
        canvas.text(24, 108 + rank * 54, f"rank {rank}", size=13, fill=DARK[rank], anchor="start", weight="600")
    words = "rank 3 sends to rank 0 in the same way; a cell is the one share that its rank has in that hop: b+c 0 is b0 + c0"
    canvas.text(360, 306, words, size=12, fill=FAINT)
    return canvas


def trees():
    """Broadcast by a tree, and along a chain."""
    canvas = headed(720, 290, "broadcast: a tree for small, a chain for large", "A binomial tree reaches eight ranks in three hops; a chain passes pieces on while the next ones come.")
    canvas.text(190, 54, "binomial: log₂ n hops of everything", size=13, weight="600")
    place = {0: (210, 84), 1: (110, 140), 2: (210, 140), 4: (300, 140), 3: (70, 196), 5: (150, 196), 6: (230, 196), 7: (60, 252)}
    for parent, child, hop in ((0, 1, 1), (0, 2, 2), (1, 3, 2), (0, 4, 3), (1, 5, 3), (2, 6, 3), (3, 7, 3)):
        (x, y), (u, v) = place[parent], place[child]
        canvas.line((x, y + 14), (u, v - 17), DARK[hop])
    for rank, (x, y) in place.items():
        canvas.add("circle", cx=x, cy=y, r=15, fill=FILL[0] if rank == 0 else PLAIN, stroke=LINE)
        canvas.text(x, y, str(rank), size=13)
    for hop in (1, 2, 3):
        canvas.text(300, 186 + hop * 20, f"hop {hop}", size=12, fill=DARK[hop], anchor="start", weight="600")
    canvas.text(545, 54, "chain: pieces, one behind the other", size=13, weight="600")
    for rank in range(4):
        canvas.text(396, 94 + rank * 40, f"rank {rank}", size=12, anchor="start")
        for piece in range(4):
            canvas.cell(446 + (piece + rank) * 36, 78 + rank * 40, 32, 30, str(piece), (piece,))
    canvas.line((446, 246), (690, 246), FAINT)
    canvas.text(570, 262, "time", size=12, fill=FAINT)
    return canvas


def direct():
    """Every share to its owner, reduced there in one pass."""
    canvas = headed(640, 292, "direct: the owner of a share reduces it in one pass", "Each rank sends every other rank its share, and reduces what it gets in rank order.")
    columns = ((84, "its vector"), (300, "its share of all vectors"), (486, "reduced once"))
    for x, words in columns:
        canvas.text(x + 62, 54, words, size=12, fill=FAINT)
    for rank in range(4):
        y = 70 + rank * 50
        canvas.text(24, y + 16, f"rank {rank}", size=13, fill=DARK[rank], anchor="start", weight="600")
        for block in range(4):
            canvas.cell(84 + block * 34, y, 31, 32, "abcd"[rank] + str(block), (rank,))
            canvas.cell(300 + block * 34, y, 31, 32, "abcd"[block] + str(rank), (block,))
            canvas.curve((222, y + 16), (297, 86 + block * 50 + (rank - 1.5) * 5), DARK[rank], width=1.1)
        canvas.line((438, y + 16), (474, y + 16), INK)
        canvas.cell(480, y, 136, 32, f"Σ{rank}, in rank order", range(4))
    canvas.text(320, 278, "all_reduce then sends the reduced shares to all ranks", size=12, fill=FAINT)
    return canvas


def mixed():
    """All-reduce on two hosts with two ranks each."""
    canvas = headed(720, 300, "all_reduce on two hosts: shared memory inside, TCP between", "The ranks of a host reduce to shares in shared memory, all-reduce each share with the other host, and gather the results.")
    phases = ("its vector", "1 reduce to shares", "2 all-reduce each share", "3 gather on the host")
    for column, words in enumerate(phases):
        canvas.text(150 + column * 160, 54, words, size=12, fill=INK if column else FAINT)
    for host in range(2):
        top = 70 + host * 112
        canvas.box(16, top, 688, 98, fill="#f1f5f9", radius=8)
        canvas.text(26, top + 14, f"host {host}", size=11, fill=FAINT, anchor="start")
        for local in range(2):
            rank, y = host * 2 + local, top + 24 + local * 38
            canvas.text(26, y + 14, f"rank {rank}", size=12, fill=DARK[rank], anchor="start", weight="600")
            pair = (host * 2, host * 2 + 1)
            for block in range(2):
                canvas.cell(108 + block * 42, y, 39, 28, "abcd"[rank] + str(block), (rank,))
                canvas.cell(588 + block * 42, y, 39, 28, f"Σ{block}", range(4))
                canvas.curve((194, y + 14), (285, top + 38 + block * 38), DARK[rank], width=1.2)
                canvas.curve((507, top + 38 + block * 38), (584, y + 14), FAINT, width=1.2)
            canvas.cell(290, y, 58, 28, "+".join("abcd"[k] for k in pair) + f" {local}", pair)
            canvas.cell(448, y, 58, 28, f"Σ{local}", range(4))
    for local in range(2):
        rows = [70 + host * 112 + 38 + local * 38 for host in range(2)]
        for here, there in (rows, rows[::-1]):
            canvas.curve((350, here), (445, there), DARK[local * 2 + 1], width=1.8)
    return canvas


def slabs():
    """A reduction on devices, in slabs."""
    canvas = headed(720, 216, "reductions on a GPU: exchange and reduction overlap", "While slab k is reduced on one stream, slab k+1 is exchanged on another.")
    transfers = (("exchange 0", 0), ("exchange 1", 0), ("gather 0", 2), ("exchange 2", 0), ("gather 1", 2), ("gather 2", 2))
    wide, left = 91, 150
    canvas.text(24, 72, "the call's stream", size=12, anchor="start", weight="600")
    canvas.text(24, 88, "(NCCL)", size=11, fill=FAINT, anchor="start")
    canvas.text(24, 146, "reduction stream", size=12, anchor="start", weight="600")
    canvas.text(24, 162, "(our kernels)", size=11, fill=FAINT, anchor="start")
    for place, (words, colour) in enumerate(transfers):
        canvas.box(left + place * wide, 62, wide - 6, 34, fill=FILL[colour])
        canvas.text(left + place * wide + wide / 2 - 3, 79, words, size=12)
    for slab, (place, passed_on) in enumerate(((1, 2), (2, 4), (4, 5))):
        x = left + place * wide
        canvas.box(x, 138, wide - 6, 34, fill=FILL[1])
        canvas.text(x + wide / 2 - 3, 155, f"reduce {slab}", size=12)
        canvas.line((x - 10, 96), (x + 8, 134), DARK[0], width=1.3)
        canvas.line((x + wide - 12, 138), (left + passed_on * wide + 8, 100), DARK[1], width=1.3)
    canvas.line((left, 192), (690, 192), FAINT)
    canvas.text(left + 12, 204, "time", size=12, fill=FAINT)
    return canvas


def windows():
    """Buffers that lie in shared memory already."""
    canvas = headed(720, 240, "buffers from alloc: nothing is copied in", "Buffers in common memory are read where they lie; only the destination is written by its owner.")
    canvas.box(190, 46, 340, 170, fill="#f1f5f9", radius=8)
    canvas.text(360, 62, "memory that all ranks of the host map", size=12, fill=FAINT)
    for rank, y in enumerate((84, 150)):
        canvas.text(40, y + 20, f"rank {rank}", size=13, fill=DARK[rank], anchor="start", weight="600")
        canvas.line((104, y + 20), (206, y + 20), DARK[rank])
        canvas.text(155, y + 8, "writes", size=11, fill=FAINT)
        canvas.box(212, y, 150, 42, fill=FILL[rank])
        canvas.text(287, y + 21, f"buffer of rank {rank}", size=13)
        canvas.cell(572, y, 120, 42, f"result of rank {rank}", range(2))
        for other, theirs in enumerate((84, 150)):
            canvas.curve((364, theirs + 21), (568, y + 14 + other * 14), DARK[other], width=1.5)
    canvas.text(468, 204, "reads where it lies", size=11, fill=FAINT)
    return canvas


PICTURES = [slots, doubling, ring, trees, direct, mixed, slabs, windows]
