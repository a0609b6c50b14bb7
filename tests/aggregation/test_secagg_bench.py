from __future__ import annotations

from fot.aggregation.bench import bench_secagg, bench_table, one_client, whole_cohort


def test_communication_stays_below_that_of_bonawitz_et_al():
    # 1,024 clients, 2**20 entries of 16 bits, the complete graph, both directions; the ring has 16 + 10 bits.
    cost = one_client(1024, 2**20, bits=26, plain_bits=16)
    assert cost.plain_bytes == 2**21
    assert 26 / 16 < cost.expansion <= 1.73


def test_one_client_costs_what_a_client_of_a_whole_cohort_costs():
    one, whole = one_client(12, 1000), whole_cohort(12, 1000, 0)
    assert (one.bytes_up, one.bytes_down) == (whole.bytes_up, whole.bytes_down)
    assert one.neighbours == whole.neighbours == 11


def test_every_stage_is_reported():
    costs = list(bench_secagg(cohorts=[16, 70], sizes=[100]))
    assert [(c.clients, c.clients_timed, c.neighbours) for c in costs] == [
        (16, 16, 15),
        (16, 16, 6),
        (70, 1, 69),
        (70, 70, 28),
    ]
    for cost in costs:
        assert list(cost.client_seconds) == ["advertise", "share", "input", "unmask"]
        assert cost.bytes_up > cost.plain_bytes == 400
        work = cost.clients_timed * sum(cost.client_seconds.values()) + sum(cost.server_seconds.values())
        assert cost.processor_seconds == work > 0
    table = bench_table(costs)
    assert [column.header for column in table.columns][-6:] == [
        "server",
        "all",
        "clock",
        "plain",
        "MB up",
        "x",
    ]
    assert [next(iter(column.cells)) for column in table.columns][-5:-3] == [
        f"{costs[0].processor_seconds:.2f}",
        f"{costs[0].total_seconds:.2f}",
    ]
