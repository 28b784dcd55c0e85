"""The shop's search: BM25 over the products, by any retriever.

WebShop searches with Lucene (Anserini's defaults, k1 = 0.9 and b = 0.4) over one text per product and shows the best 50
(search_engine/convert_product_file_format.py, ``SEARCH_RETURN_N``). ``write_corpus`` writes these texts as a corpus for
``retrieval.index.BuildIndex``, whose BM25 is the same Lucene with the same defaults. A corpus line has a title line
before the text; the words are the published ones.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from common.files import write_atomically
from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.products import Product
from retrieval.types import RetrievalError
from rollout.tools.search import Retriever, SearchTool
from rollout.trajectory import InfrastructureError

TOPK = 50
NO_TEXT = "."  # a corpus line needs text after the title; Lucene finds no word in this


def passage(product: Product) -> dict[str, str]:
    """Return a product as a line of the search corpus: title, description, first feature and options, in lower case."""
    choices = ", and ".join(f"{option.name}: {', '.join(option.values)}" for option in product.options)
    text = " ".join(" ".join([product.description, *product.bullets[:1], choices]).lower().split())
    title = " ".join(product.title.lower().split()) or product.asin.lower()
    return {"id": product.asin, "contents": f'"{title}"\n{text or NO_TEXT}'}


def write_corpus(catalogue: Catalogue, path: str | Path) -> None:
    """Write all products as a ``.jsonl`` search corpus for ``retrieval.index.BuildIndex``, in the catalogue's order,
    atomically.
    """
    lines = (orjson.dumps(passage(product), option=orjson.OPT_APPEND_NEWLINE) for product in catalogue.products)
    write_atomically(Path(path), b"".join(lines))


class ProductSearch:
    """Searches the products of a shop, for all its sessions.

    Args:
        retriever: as for the search tool: ``RetrieverProcess`` over the index, or ``RetrieverClient`` of a server.
        topk: number of results over all pages.
    """

    def __init__(self, retriever: Retriever, topk: int = TOPK) -> None:
        self.retriever, self.topk = retriever, topk

    async def start(self, catalogue: Catalogue) -> None:
        """Start the retriever, and check by a search for the first product's title that it finds products of the
        catalogue.

        Raises InfrastructureError if the retriever does not answer, its own errors for a wrong index, and ValueError if
        the results are not products of the catalogue.
        """
        await SearchTool(self.retriever, self.topk).start()
        title = catalogue.products[0].title
        ids = await self._ids(title)
        if ids and not any(asin in catalogue.by_asin for asin in ids):
            raise ValueError(
                f"the search for {title!r} found {', '.join(ids[:3])}, which are not in the catalogue; expected its "
                "products. Build the index from the file of search_index.write_corpus, or name the right server"
            )

    async def find(self, query: str, catalogue: Catalogue) -> tuple[Product, ...]:
        """Return the products that the search finds, best first; () for a query without a word.

        Leaves out hits that the catalogue lacks, as published (an index may have more). Raises InfrastructureError if
        the search fails.
        """
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
