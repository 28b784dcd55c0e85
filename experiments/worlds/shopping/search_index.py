"""The shop's search: BM25 over the products, by whatever retriever is given.

WebShop searches with Lucene (Anserini's defaults, k1 = 0.9 and b = 0.4) over one text per product and shows the best
50 (search_engine/convert_product_file_format.py, ``SEARCH_RETURN_N``). ``write_corpus`` writes these texts as a corpus
of ``retrieval/``, whose BM25 is the same Lucene with the same defaults; build the index of it with
``retrieval.index.BuildIndex``. A corpus line holds a title line before the text; the words are the published ones.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from common.files import write_atomically
from common.validation import check_at_least_one
from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.products import Product
from retrieval.types import RetrievalError
from rollout.tools.search import Retriever, SearchTool
from rollout.trajectory import InfrastructureError

TOPK = 50
NO_TEXT = "."  # a corpus wants some text behind the title; Lucene finds no word in this


def passage(product: Product) -> dict[str, str]:
    """A corpus line: title, description, first feature and options, all in lower case."""
    choices = ", and ".join(f"{option.name}: {', '.join(option.values)}" for option in product.options)
    text = " ".join(" ".join([product.description, *product.bullets[:1], choices]).lower().split())
    title = " ".join(product.title.lower().split()) or product.asin.lower()
    return {"id": product.asin, "contents": f'"{title}"\n{text or NO_TEXT}'}


def write_corpus(catalogue: Catalogue, path: str | Path) -> None:
    """Write ``.jsonl`` for ``retrieval.index.BuildIndex``, in the catalogue's order. Replaced in one step."""
    lines = (orjson.dumps(passage(product), option=orjson.OPT_APPEND_NEWLINE) for product in catalogue.products)
    write_atomically(Path(path), b"".join(lines))


class ProductSearch:
    """Finds products. Shared by all sessions of a shop.

    Args:
        retriever: as the search tool's: ``RetrieverProcess`` over the index, ``RetrieverClient`` of a server, or alike.
        topk: results in all, over their pages.
    """

    def __init__(self, retriever: Retriever, topk: int = TOPK) -> None:
        check_at_least_one(topk=topk)
        self.retriever, self.topk = retriever, topk

    async def start(self, catalogue: Catalogue) -> None:
        """Start the retriever and search for the first product's title.

        Raises InfrastructureError when it does not answer, what it raises for a wrong index, and ValueError when what
        it finds are no products of the catalogue.
        """
        await SearchTool(self.retriever, self.topk).start()
        title = catalogue.products[0].title
        ids = await self._ids(title)
        if ids and not any(asin in catalogue.by_asin for asin in ids):
            raise ValueError(
                f"the search for {title!r} found {', '.join(ids[:3])}, of which none is in the catalogue: its index is "
                "of other texts. Build one of search_index.write_corpus's file, or name the right server"
            )

    async def find(self, query: str, catalogue: Catalogue) -> tuple[Product, ...]:
        """The best products, best first; none for a query without a word. Hits that the catalogue lacks are left out,
        as published (an index may hold more). Raises InfrastructureError when the search fails."""
        if not query.strip():
            return ()
        return tuple(catalogue.by_asin[asin] for asin in await self._ids(query) if asin in catalogue.by_asin)

    async def _ids(self, query: str) -> list[str]:
        try:
            [hits] = await self.retriever.search([query], self.topk)
        except RetrievalError as error:
            raise InfrastructureError(f"the shop's search failed: {error}") from error
        return [hit.id for hit in hits]

    async def close(self) -> None:
        await self.retriever.close()
