"""Tensor parallelism layer by layer: tensors split, broadcast and partial-sum on a grid of devices (AutoDDL, sec. 4).

Every matrix product has a strategy (p0, p1, p2), p0 p1 p2 devices in all:

    input (S0:p0, B:p1, S1:p2)  x  weight (B:p0, S1:p1, S0:p2)  =  output (S0:p0, S1:p1, P:p2)

         +--p2--+                     +--p1--+                          +--p1--+
      p0 |      |                  p2 |      |                       p0 |      |  p2 such sums
         +------+                     +------+                          +------+

Between products a tensor is split into as many blocks as there are devices, `rows` x `columns` of them: its layout.

    output --reduce-scatter over p2--> layout --all-to-all--> layout' --all-gather over q1--> input of (q0, q1, q2)

and back the same way with the gradients: all-gather over p2 <-- all-to-all <-- reduce-scatter over q1.

`grid` has the factors of the devices, `collectives` what these cost, `chain` the products of a model, `costs` what a
strategy costs and where it can stand, `optimum` the cheapest ones, `traffic` the bytes that they send.
"""
