"""How data-parallel ranks agree on K, step by step. No Ray: rendezvous is the deployment's part.

Each rank holds one connection to a coordinator, a thread in rank 0's process. Before a step a rank
reports how many requests it will run; when every busy rank has reported, or the first of them has
waited `max_delay_s`, the round closes and all who reported get the largest number. So one small
message each way, and a rank that is slow or stuck costs the others one bounded wait: it is not
waited for again until it has reported.

A rank that is gone ends the agreement for all, for good: everyone uses the static K, as under
`dynamic_k_dp_policy: disable`, until the gang is restarted.

Where experts of the target span the ranks (`lockstep`), every rank must run as many steps as the
others: a round has no deadline, and ranks without work are told to run a dummy step in each.
Experts of a draft model stay within their replica: they would need equal numbers of draft passes
too, which K as an upper bound does not give, since a request near its end drafts less.
"""
