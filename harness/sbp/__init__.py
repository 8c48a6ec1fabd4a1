"""Tensor parallelism layer by layer: tensors split, broadcast and partial-sum on a grid of devices (AutoDDL, sec. 4).

Every matrix product has a strategy (p0, p1, p2), p0 p1 p2 devices in all:

    input (S0:p0, B:p1, S1:p2)  x  weight (B:p0, S1:p1, S0:p2)  =  output (S0:p0, S1:p1, P:p2)

         +--p2--+                     +--p1--+                          +--p1--+
      p0 |      |                  p2 |      |                       p0 |      |  p2 such sums
         +------+                     +------+                          +------+

Between products a tensor is split into as many blocks as there are devices, `rows` x `columns` of them: its layout.

    output --reduce-scatter over p2--> layout --all-to-all--> layout' --all-gather over q1--> input of (q0, q1, q2)

and back the same way with the gradients: all-gather over p2 <-- all-to-all <-- reduce-scatter over q1.

grid        devices as prime factors, of nodes and of a node's devices; strategies (p0, p1, p2)
chain       what of a profile is split: products in a row, attention between them, residual branches
collectives alpha-beta;  costs  of a strategy, and between which layouts it stands;  traffic  bytes
route       strategies and moves, in order
optimum     the cheapest route, exactly: a shortest path of matrix after matrix (matrix: the way from place to place)
limit       within bytes: bounds first, then labels between them (between, labels, stages; edges, frontier and pareto
            are the ways through a product or a branch that nothing dominates)
repeated    layers that are split alike
baselines   data parallel, Megatron, SUMMA
planned     from a route to a plan, and a device's share of a profile
fit         alpha and beta from timings
"""
