"""A shop behind HTTP is the same environment as our own; what it does wrong is its own fault."""

import asyncio
import random

import pytest

from rollout.environments.shopping.generate import generate_catalogue
from rollout.environments.shopping.goals import as_task, make_goals
from rollout.environments.shopping.html_pages import UnknownPage, read_page
from rollout.environments.shopping.remote import MAX_QUERY, RemoteSession, RemoteShopping, clean_query
from rollout.environments.shopping.search_index import ProductSearch
from rollout.environments.shopping.shop import Shelves, ShopSession
from rollout.trajectory import Action, ActionKind, InfrastructureError, Task, ToolRequest
from tests.rollout.environments.shopping.shopping_world import WordRetriever, goal, published_catalogue
from tests.rollout.environments.shopping.webshop_server import WebShopServer, serving_shop
from tests.rollout.serving import free_port


def act(text):
    return Action(ActionKind.CALL, calls=(ToolRequest("act", {"action": text}),))


async def compare(catalogue, wanted, choose, steps):
    """Walk both shops with the same actions; every page but the last must be the same. Returns their names."""
    server, names = WebShopServer(catalogue, [goal(), wanted]), []
    async with serving_shop(server) as url:
        shop = RemoteShopping(url)
        await shop.start()
        there = RemoteSession(shop._server, 1)
        here = ShopSession(wanted, Shelves(catalogue, ProductSearch(WordRetriever(catalogue))))
        assert (await there.open(), there.page.info) == (here.page, here.page.info)
        for step in range(steps):
            action = choose(step, here.page)
            assert await there.act(action) == await here.act(action), action
            names.append(here.page.name)
            assert (there.done, there.score) == (here.done, here.score), action
            if here.done:
                assert there.page.name == "end" and there.page.texts[0] == here.page.texts[0]
                break
            assert there.page == here.page, action
        await shop.close()
    return names


def test_a_given_walk_is_the_same_in_both_shops(tmp_path):
    walk = [
        "look", "search[Norvik's \"slim\" SHIRT, 100%]", "click[next >]", "click[< prev]", "click[b000000001]",
        "click[Light | Blue]", "click[red]", "click[description]", "click[< prev]", "click[features]", "click[< prev]",
        "click[reviews]", "click[<  prev]", "click[< prev]", "click[small]", "search[shampoo]", "click[b000000002]",
        "click[features]", "click[back to search]", "search[slim shirt]", "click[b000000001]", "click[small]",
        "click[red]", "click[buy now]",
    ]  # fmt: skip
    names = asyncio.run(compare(published_catalogue(tmp_path), goal(), lambda n, page: walk[n], len(walk)))
    assert len(names) == len(walk) and names[-1] == "end"


@pytest.mark.parametrize("seed", range(4))
def test_random_walks_are_the_same_in_both_shops(seed):
    catalogue, rng = generate_catalogue(30, seed=seed), random.Random(seed)
    wanted = make_goals(catalogue)[seed]

    def choose(step, page):
        offers = [a for a in page.info["admissible"] if a != "click[buy now]" or step > 20]
        offers += ["click[nothing]"]
        return rng.choice(offers).replace("<your query>", wanted.instruction)

    names = asyncio.run(compare(catalogue, wanted, choose, 30))
    assert {"search", "results", "item"} <= set(names)


def test_an_episode_over_http(tmp_path):
    catalogue = published_catalogue(tmp_path)

    async def main():
        async with serving_shop(WebShopServer(catalogue, [goal(), goal()])) as url:
            shop = RemoteShopping(url + "/", reward=10.0)
            await shop.start()
            environment = shop(as_task(goal(), 1, "evaluation"))
            opening = await environment.reset()
            steps = [
                await environment.step(act(text))
                for text in ("search[shirt]", "click[b000000001]", "click[red]", "click[small]", "click[buy now]")
            ]
            await environment.close()
            await shop.close()
            return opening, steps

    opening, steps = asyncio.run(main())
    assert opening.text.startswith("WebShop [SEP] Instruction: [SEP] find me a shirt [SEP] Search")
    assert opening.info["admissible"] == ["search[<your query>]"]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert [step.reward for step in steps] == [0.0] * 4 + [10.0]
    assert steps[-1].measures == {"score": 1.0, "success": 1.0}


def test_each_visit_is_a_session_of_its_own(tmp_path):
    server = WebShopServer(published_catalogue(tmp_path), [goal(), goal(instruction="second")])

    async def main():
        async with serving_shop(server) as url:
            shop = RemoteShopping(url)
            visits = [shop(as_task(goal(), 1, "train")) for _ in range(3)]
            openings = await asyncio.gather(*(visit.reset() for visit in visits))
            await shop.close()
            return openings

    assert {opening.text.split(" [SEP] ")[2] for opening in asyncio.run(main())} == {"second"}
    assert len(server.sessions) == 3


@pytest.mark.parametrize(
    "text", ["a/b", "../../done", "\udcff\x00\n", "%2f%00?#&", "<r>", "é日本", "x" * 10_000, "\\'\""]
)
def test_whatever_is_searched_for_the_server_can_answer(tmp_path, text):
    server = WebShopServer(published_catalogue(tmp_path), [goal()])

    async def main():
        async with serving_shop(server) as url:
            shop = RemoteShopping(url, retries=0)
            session = RemoteSession(shop._server, 0)
            await session.open()
            did = await session.act(f"search[{text}]")
            await shop.close()
            return did, session.page.name

    did, name = asyncio.run(main())
    assert name == ("results" if did else "search")
    assert did == bool(clean_query(text)) or "\n" in text


def test_queries_are_made_fit_for_an_address():
    assert clean_query(" Red/blue \n shoes\x00 ") == "red blue shoes"
    assert len(clean_query("y" * 10_000)) == MAX_QUERY and clean_query("/\udcff") == ""


def served(answers, retries=1, timeout_s=5.0):
    """Opens a session at a server that gives these answers first; what was asked, and the session."""
    server = WebShopServer(generate_catalogue(5), [goal()])
    server.broken = answers.copy()

    async def main():
        async with serving_shop(server) as url:
            shop = RemoteShopping(url, retries=retries, backoff_s=0.001, timeout_s=timeout_s)
            try:
                await shop.start()
            finally:
                await shop.close()

    return server, main


def test_a_server_that_recovers_is_asked_again():
    server, main = served([(503, ""), (500, "")], retries=2)
    asyncio.run(main())
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answers", "retries", "asked", "message"),
    [
        ([(500, "down")] * 9, 1, 2, "status 500: down"),
        ([(404, "nothing here")], 3, 1, "status 404: nothing here"),
        ([(200, "<html>hello</html>")], 3, 1, "is no page of WebShop: it has neither an instruction"),
        ([(200, '<h3 id="reward">x<pre>much</pre></h3>')], 3, 1, "its score is 'much'; expected a number"),
    ],
)
def test_failures_of_the_server(answers, retries, asked, message):
    server, main = served(answers, retries)
    with pytest.raises(InfrastructureError, match=message):
        asyncio.run(main())
    assert len(server.asked) == asked


def test_nobody_there_and_nobody_in_time():
    nobody = RemoteShopping(f"http://127.0.0.1:{free_port()}", retries=1, backoff_s=0.001)
    with pytest.raises(InfrastructureError, match="did not serve .*ClientConnectorError"):
        asyncio.run(nobody.start())

    async def slow():
        async def sleep(reader, writer):
            await reader.read()
            writer.close()

        silent = await asyncio.start_server(sleep, "127.0.0.1", 0)
        shop = RemoteShopping(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", retries=0, timeout_s=0.05)
        try:
            await shop.start()
        finally:
            await shop.close()
            silent.close()

    with pytest.raises(InfrastructureError, match="no answer within 0.05 s"):
        asyncio.run(slow())


def test_wrong_settings_are_told():
    with pytest.raises(ValueError, match='expected "http://host:port"'):
        RemoteShopping("localhost:3000")
    with pytest.raises(ValueError, match="found 0, 2, 0.5, 64"):
        RemoteShopping("http://localhost", timeout_s=0)
    with pytest.raises(ValueError, match="reward is 0"):
        RemoteShopping("http://localhost", reward=0)
    with pytest.raises(ValueError, match="has index None; expected the number of a goal"):
        RemoteShopping("http://localhost")(Task("t", "", (), ""))
    with pytest.raises(ValueError, match="goals that cannot be shopped for:\ntask t: .*index None"):
        RemoteShopping("http://localhost").check([Task("t", "", (), "")])


def test_texts_are_split_as_beautifulsoup_splits_them():
    read = read_page("<p>Instruction:<br> a &amp; b<!-- c --> d</p>\n <p> </p><p>\n</p><style>x</style>", "item")
    # A text of blanks alone counts unless it holds a line break: BeautifulSoup keeps " " and makes "\n" of the other.
    assert read.page.texts == ("Instruction:", "a & b", "d", "")
    with pytest.raises(UnknownPage):
        read_page("", "item")
