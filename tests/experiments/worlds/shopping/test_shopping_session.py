"""A visit to the shop: what each action does, and what it leaves alone."""

import asyncio

import pytest

from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.generate import generate_catalogue
from experiments.worlds.shopping.goals import make_goals
from experiments.worlds.shopping.products import Option, Product
from experiments.worlds.shopping.search_index import ProductSearch
from experiments.worlds.shopping.shop import ShopData, ShopSession
from rollout.trajectory import InfrastructureError
from tests.experiments.worlds.shopping.shopping_world import WordRetriever, goal, published_catalogue


def visit(catalogue, wanted=None, **options):
    retriever = WordRetriever(catalogue)
    return ShopSession(wanted or goal(), ShopData(catalogue, ProductSearch(retriever), **options)), retriever


def play(session, *actions):
    """What each action did."""

    async def main():
        return [await session.act(action) for action in actions]

    return asyncio.run(main())


@pytest.fixture
def shirts(tmp_path):
    return visit(published_catalogue(tmp_path))


def test_from_the_search_to_the_purchase(shirts):
    session, retriever = shirts
    assert session.page.name == "search"
    assert play(session, "search[Slim SHIRT]") == [True]
    assert retriever.asked == ["slim shirt"] and session.page.clickables[2:] == ("b000000001",)
    assert play(session, "click[B000000001]", "click[Red]", "click[small]") == [True] * 3
    assert (session.page.name, session.options, session.done) == ("item", {"color": "red", "size": "small"}, False)
    assert play(session, "click[Buy Now]") == [True]
    assert (session.page.name, session.done, session.score) == ("end", True, 1.0)


def test_options_count_and_a_second_value_replaces_the_first(shirts):
    session, _ = shirts
    play(session, "search[shirt]", "click[b000000001]", "click[red]", "click[light | blue]", "click[x-large]")
    assert session.options == {"color": "light | blue", "size": "x-large"}
    play(session, "click[buy now]")
    assert session.score == pytest.approx(2 / 4)  # attribute and price, no option


def test_sub_pages_keep_what_is_chosen_and_the_results_forget_it(shirts):
    session, retriever = shirts
    play(session, "search[shirt]", "click[b000000001]", "click[red]")
    item = session.page
    for name in ("description", "Features", "reviews"):
        assert play(session, f"click[{name}]") == [True] and session.page.name == "item_sub_page"
        assert play(session, "click[< prev]") == [True]
        assert session.page == item and session.options == {"color": "red"}
    play(session, "click[< Prev]")
    assert (session.page.name, session.options, len(retriever.asked)) == ("results", {}, 1)
    play(session, "click[b000000001]", "click[red]", "click[back to search]")
    assert (session.page.name, session.options) == ("search", {})


def test_pages_of_results():
    catalogue = generate_catalogue(25, seed=0)
    everything = make_goals(catalogue)[0]
    session, _ = visit(catalogue, everything)
    play(session, "search[with and]")
    shown = [set(session.page.clickables)]
    assert "< prev" not in shown[0] and len(shown[0]) == 12  # back, next and ten products
    for _ in range(3):
        assert play(session, "click[Next >]") == [True]
        shown.append(set(session.page.clickables))
    assert [len(page) for page in shown[1:]] == [13, 8, 3]  # the last one is behind the end, as published
    assert len(set.union(*shown)) == 25 + 3
    play(session, "click[< prev]", "click[< prev]")
    second = session.page
    play(session, f"click[{next(iter(shown[1] - shown[0] - {'< prev'}))}]", "click[< prev]")
    assert session.page == second  # from an item back to its own page of results


@pytest.mark.parametrize(
    "text",
    [
        "",
        "click[search]",
        "Click[buy now]",
        "click[b000000002]",
        "click[next >]",
        "search[",
        "click[\x00]",
    ],
)
def test_what_is_not_on_the_page_does_nothing(shirts, text):
    session, retriever = shirts
    play(session, "search[shirt]", "click[b000000001]", "click[red]")
    page, asked = session.page, len(retriever.asked)
    assert play(session, text) == [False]
    assert (session.page, session.options, len(retriever.asked)) == (page, {"color": "red"}, asked)


def test_after_the_purchase_nothing_happens(shirts):
    session, _ = shirts
    play(session, "search[shirt]", "click[b000000001]", "click[buy now]")
    page = session.page
    assert play(session, "search[shirt]", "click[back to search]", "click[buy now]") == [False] * 3
    assert session.page == page


def test_labels_of_buttons_come_before_options_and_later_options_before_earlier():
    odd = Product(
        "B1", "Odd shirt", "c", "q", "p", "", (), (Option("a", ("x", "features")), Option("b", ("x", "next >"))),
        ("soft",), (5.0,), 5.0,
    )  # fmt: skip
    session, _ = visit(Catalogue([odd]), goal(asin="B1"))
    play(session, "search[odd]", "click[b1]", "click[x]", "click[next >]", "click[features]")
    assert (session.options, session.page.name) == ({"b": "next >"}, "item_sub_page")


def test_hits_that_the_catalogue_lacks_are_left_out(tmp_path):
    whole = published_catalogue(tmp_path)
    session, _ = visit(Catalogue(whole.products[1:]))
    session._shop.search.retriever = WordRetriever(whole)
    play(session, "search[shirt shampoo]")
    assert session.page.clickables[2:] == ("b000000002",)


def test_a_failing_search_is_no_fault_of_the_visitor(shirts):
    session, retriever = shirts
    retriever.fails = True
    with pytest.raises(InfrastructureError, match="the shop's search failed: the retriever has ended"):
        play(session, "search[shirt]")
    assert session.page.name == "search"
