"""Product catalogues and their file format."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from common.files import write_atomically
from common.validation import first_problem
from experiments.worlds.shopping.products import CatalogueError, Product

_PRODUCT = TypeAdapter(Product)
_ONE_READER = threading.Lock()  # if two threads ask at once, the second waits for the result of the first


class Catalogue:
    """The products of a shop in file order, found by asin (product number).

    Raises:
        CatalogueError: no product, or an asin occurs twice.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = tuple(products)
        self.by_asin = {product.asin: product for product in self.products}
        if not self.products:
            raise CatalogueError("a catalogue without a product; expected at least one")
        if len(self.by_asin) != len(self.products):
            raise CatalogueError(f"{len(self.products)} products, but {len(self.by_asin)} asins; expected one each")

    def __len__(self) -> int:
        return len(self.products)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 over all products in order, as text. Equal catalogues have equal fingerprints."""
        digest = hashlib.sha256()
        for product in self.products:
            digest.update(_line(product))
        return digest.hexdigest()


def load_catalogue(path: str | Path) -> Catalogue:
    """Read a product catalogue file, once per process while the file does not change.

    Raises:
        CatalogueError: the file is missing, or ``write_catalogue`` did not write it.
    """
    try:
        found = Path(path).stat()
    except OSError as error:
        raise CatalogueError(f"{path}: {error.strerror}; expected a catalogue file") from error
    with _ONE_READER:
        return _load(Path(path).resolve(), found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _load(path: Path, size: int, modified_ns: int) -> Catalogue:
    """Read a catalogue file. ``size`` and ``modified_ns`` make a changed file a new entry of the cache."""
    with path.open("rb") as file:
        return Catalogue([_product(path, number, line) for number, line in enumerate(file, start=1)])


def _product(path: Path, number: int, line: bytes) -> Product:
    try:
        return _PRODUCT.validate_json(line, strict=True)
    except ValidationError as error:
        raise CatalogueError(
            f"{path}, line {number}: not a product of write_catalogue ({first_problem(error)}); expected a "
            "catalogue.jsonl as BuildShop and ListWebShop write it"
        ) from error


def write_catalogue(catalogue: Catalogue, path: str | Path) -> None:
    """Write the products to a ``.jsonl`` file, one per line, atomically. ``load_catalogue`` returns an equal
    catalogue."""
    if Path(path).suffix != ".jsonl":
        raise ValueError(f"{path}: expected a name that ends in .jsonl")
    write_atomically(Path(path), b"".join(_line(product) for product in catalogue.products))


def _line(product: Product) -> bytes:
    return orjson.dumps(product, option=orjson.OPT_APPEND_NEWLINE)
