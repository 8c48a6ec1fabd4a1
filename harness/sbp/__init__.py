"""Tensor parallelism layer by layer: tensors split, broadcast and partial-sum on a grid of devices (AutoDDL, sec. 4).

Every matmul has a strategy (p0, p1, p2), p0 p1 p2 devices in all:

    input (S0:p0, B:p1, S1:p2)  x  weight (B:p0, S1:p1, S0:p2)  =  output (S0:p0, S1:p1, P:p2)

         +--p2--+                     +--p1--+                          +--p1--+
      p0 |      |                  p2 |      |                       p0 |      |  p2 such sums
         +------+                     +------+                          +------+

Between matmuls a tensor is split into as many blocks as there are devices, `rows` x `columns` of them: its layout.

    output --reduce-scatter over p2--> layout --all-to-all--> layout' --all-gather over q1--> input of (q0, q1, q2)

and the gradients return along the same path: all-gather over p2 <-- all-to-all <-- reduce-scatter over q1.

Modules, in reading order:

device_grid         devices as prime factors, of nodes and of a node's devices; strategies (p0, p1, p2)
matmul_chain        what of a profile is split: matmuls in a row, attention between them, residual branches
collective_costs    alpha-beta seconds of collectives; collective_volume: the collectives of a step, with their bytes
strategy_costs      seconds and bytes of a strategy, and the layouts before and after it
route               strategies and moves, in order: what a search returns
shortest_path       the cheapest route, exactly; distance_matrix: the cheapest path from layout to layout
memory_limit        the cheapest route within a limit of bytes: bounds first, then bounded_search, a search of labels
                    between the bounds (pareto, pareto_edges, pareto_sections: Pareto-optimal paths through a matmul or
                    a branch)
repeated_layers     layers that share one split
baselines           data parallelism, Megatron, SUMMA (summa: its collectives)
route_to_plan       from a route to a plan, and a device's share of a profile
"""
