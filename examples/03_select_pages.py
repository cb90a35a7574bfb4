"""Hide a key early in a long sequence, ask for it late, and see which pages each block of queries would read."""

from __future__ import annotations

import torch

from sparse_pages import PageSummary, select_pages

PAGE, CHUNK, TOKENS = 64, 1024, 16384
HEADS, KV_HEADS, WIDTH = 8, 2, 64
NEEDLE, ASKED_AT = 3000, 16000  # the positions of the key and of the query that wants it


def sequence() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, TOKENS, HEADS, WIDTH, generator=generator)
    k = torch.randn(1, TOKENS, KV_HEADS, WIDTH, generator=generator)
    wanted = torch.randn(WIDTH, generator=generator)
    k[:, NEEDLE] += 12 * wanted
    q[:, ASKED_AT] += 3 * wanted
    return q, k


def selected(q: torch.Tensor, k: torch.Tensor, chunk: int, scorer: str) -> torch.Tensor:
    """The page lists [Q, 11] of the whole sequence, chosen chunk by chunk."""
    summary, lists = PageSummary(PAGE, scorer), []
    for start in range(0, TOKENS, chunk):
        part = slice(start, start + chunk)
        summary.append(k[:, part])
        lists.append(select_pages(q[:, part], summary, past_pages=start // PAGE, top_k=8, recent=2, sinks=1))
    return torch.cat(lists, 2)[0, 0]


def main() -> None:
    q, k = sequence()
    for scorer in ("mean", "minmax"):
        lists = selected(q, k, CHUNK, scorer)
        asked = lists[ASKED_AT // PAGE].tolist()
        print(f"{scorer:>6}: block {ASKED_AT // PAGE} of {len(lists)} reads pages {asked}")
        print(f"        the needle is in page {NEEDLE // PAGE}: {'found' if NEEDLE // PAGE in asked else 'missed'}")
        same = torch.equal(lists, selected(q, k, TOKENS, scorer))
        print(f"        chunks of {CHUNK} and of {TOKENS} tokens select the same pages: {same}")
        if not same or NEEDLE // PAGE not in asked:
            raise SystemExit("this should not happen")


if __name__ == "__main__":
    main()
