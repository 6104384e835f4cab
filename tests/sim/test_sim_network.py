"""The simulated network behaves as TCP does, and no better."""

from typing import Any

from farfill.sim.checkers import Checkers
from farfill.sim.network import End, Network, Node, Timing
from farfill.sim.world import World


class Ends:
    """A connection whose two ends note what they get."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.network = Network(self.world, Timing(jitter_s=0.5))
        self.nodes = (Node("client"), Node("server"))
        self.at_server: list[Any] = []
        self.at_client: list[Any] = []
        self.nodes[1].services["data"] = self._accept
        self.client = self.connect()
        self.server: End

    def connect(self) -> End:
        client = self.network.connect(*self.nodes, "data")
        client.on_message = self.at_client.append
        client.on_lost = lambda: self.at_client.append("lost")
        return client

    def _accept(self, end: End) -> None:
        self.server = end
        end.on_message = self.at_server.append
        end.on_lost = lambda: self.at_server.append("lost")

    def run(self, until: float) -> None:
        self.world.run(until, Checkers())


def test_order_is_kept_inside_a_connection_and_sending_may_begin_at_once() -> None:
    ends = Ends()
    for number in range(50):
        ends.client.send(number)
    ends.run(10.0)
    assert ends.at_server == list(range(50))
    ends.server.send("a", 100_000)
    ends.server.send("b", 1)
    ends.run(20.0)
    assert ends.at_client == ["a", "b"]


def test_two_connections_overtake_each_other() -> None:
    orders = set()
    for seed in range(20):
        ends = Ends(seed)
        other = ends.connect()
        ends.client.send("first")
        other.send("second")
        ends.run(10.0)
        orders.add(tuple(ends.at_server))
    assert orders == {("first", "second"), ("second", "first")}


def test_closing_is_seen_behind_what_was_sent() -> None:
    ends = Ends()
    ends.client.send("last", 50_000)
    ends.client.close()
    ends.client.send("after")
    ends.run(10.0)
    assert ends.at_server == ["last", "lost"]
    assert ends.at_client == []  # its own close is no loss
    assert ends.network.connections == {}


def test_after_a_cut_each_end_learns_in_its_own_time_and_nothing_more_arrives() -> None:
    ends = Ends()
    ends.run(1.0)
    connection = ends.client.connection
    ends.network.cut(connection, (0.5, 3.0), drops_in_flight=False)
    ends.client.send("into the void")
    ends.run(2.0)
    assert (ends.at_client, ends.at_server) == (["lost"], [])
    ends.run(5.0)
    assert (ends.at_client, ends.at_server) == (["lost"], ["lost"])
    assert ends.network.connections == {}


def test_what_was_under_way_at_a_cut_arrives_or_not() -> None:
    for drops, arrived in ((False, ["under way"]), (True, [])):
        ends = Ends()
        ends.run(1.0)
        ends.client.send("under way")
        ends.network.cut(ends.client.connection, (5.0, 5.0), drops)
        ends.run(4.0)
        assert ends.at_server == arrived


def test_nobody_listening_is_a_loss_for_the_client_alone() -> None:
    ends = Ends()
    ends.nodes[1].up = False
    ends.client.send("hello")
    ends.run(10.0)
    assert (ends.at_client, ends.at_server) == (["lost"], [])


def test_a_crash_silences_the_node_and_tells_the_peer() -> None:
    ends = Ends()
    ends.run(1.0)
    old = ends.server
    ends.client.send("to the dead")
    ends.network.crash(ends.nodes[1])
    ends.run(5.0)
    assert (ends.at_client, ends.at_server) == (["lost"], [])
    ends.network.restart(ends.nodes[1])
    old.send("from the dead")  # a driver of the former life
    ends.connect().send("to the new life")
    ends.run(10.0)
    assert (ends.at_client, ends.at_server) == (["lost"], ["to the new life"])


def test_a_stalled_node_hears_late_and_is_not_lost() -> None:
    ends = Ends()
    ends.run(1.0)
    ends.nodes[1].stalled_until = 7.0
    ends.client.send("hello")
    ends.run(6.9)
    assert ends.at_server == []
    ends.run(7.1)
    assert (ends.at_server, ends.at_client) == (["hello"], [])
