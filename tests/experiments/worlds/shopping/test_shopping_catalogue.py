"""WebShop's files become typed products, as published; our own file gives the same products back."""

import json

import pytest

from experiments.worlds.shopping.catalogue import Catalogue, load_catalogue, write_catalogue
from experiments.worlds.shopping.generate import generate_catalogue
from experiments.worlds.shopping.products import CatalogueError, Instruction, Option
from experiments.worlds.shopping.webshop_files import NO_ATTRIBUTE, load_webshop, read_prices
from tests.experiments.worlds.shopping.shopping_world import ITEMS, published_catalogue, write_files


def test_items_are_read_as_published(tmp_path):
    catalogue = published_catalogue(tmp_path)
    assert [p.asin for p in catalogue.products] == ["B000000001", "B000000002", "B000000003"]
    shirt, shampoo, lamp = catalogue.products
    assert shirt.query == "men's shirts"
    assert shirt.options == (Option("color", ("light | blue", "red")), Option("size", ("small", "x-large")))
    assert (shirt.prices, shirt.price, shirt.price_tag) == ((19.99,), 19.99, "$19.99")
    assert shirt.synthetic == Instruction("Find me slim fit men's shirts", ("slim fit",))
    assert (shampoo.bullets, shampoo.description, shampoo.options) == (("With tea tree",), "", ())
    assert shampoo.price_tag == "$9.98 to $16.98" and 9.98 <= shampoo.price <= 16.98
    assert (lamp.attributes, lamp.prices, lamp.synthetic) == ((NO_ATTRIBUTE,), (100.0,), None)


def test_prices():
    assert read_prices("$1,299.50") == (1299.5,)
    assert read_prices("$9.98 - $16.98 - $20") == (9.98, 16.98)
    assert read_prices(None) == read_prices("") == read_prices("Currently unavailable") == (100.0,)


def test_a_file_is_read_once_until_it_changes(tmp_path):
    path = tmp_path / "catalogue.jsonl"
    write_catalogue(generate_catalogue(3), path)
    first = load_catalogue(path)
    assert load_catalogue(path) is first
    write_catalogue(Catalogue(first.products[:2]), path)
    assert load_catalogue(path).products == first.products[:2]


def test_our_own_file_is_an_exact_round_trip(tmp_path):
    for number, catalogue in enumerate([published_catalogue(tmp_path), generate_catalogue(40, seed=3)]):
        path = tmp_path / f"catalogue{number}.jsonl"
        write_catalogue(catalogue, path)
        read = load_catalogue(path)
        assert read.products == catalogue.products and read.fingerprint == catalogue.fingerprint


def test_wrong_files_are_named(tmp_path):
    files = write_files(tmp_path)

    def written(content):
        files["items"].write_text(content if isinstance(content, str) else json.dumps(content))
        return load_webshop(**files)

    with pytest.raises(CatalogueError, match="nowhere.json: No such file"):
        load_webshop(**(files | {"items": tmp_path / "nowhere.json"}))
    with pytest.raises(CatalogueError, match="not JSON"):
        written("[{")
    with pytest.raises(CatalogueError, match="found dict; expected a list of items"):
        written({})
    with pytest.raises(CatalogueError, match="no usable product"):
        written([])
    with pytest.raises(CatalogueError, match="item 0: no name; it has asin"):
        written([{key: value for key, value in ITEMS[0].items() if key != "name"}])
    with pytest.raises(CatalogueError, match=r"item 0 \(B000000001\): not of WebShop's shape .*expected a text"):
        written([ITEMS[0] | {"name": 7}])
    with pytest.raises(CatalogueError, match=r"not of WebShop's shape \(AttributeError"):
        written([ITEMS[0] | {"customization_options": {"size": [{"value": 7}]}}])
