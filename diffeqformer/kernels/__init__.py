"""Pallas kernels for TPUs that read and update the hypernetwork's P, [inputs, E, outputs], where it lies.

A generator's P is much larger than the weights that it generates, so its time is that of moving P. XLA moves it more
often than needed. Three kernels take its place for one generated layer, and each reads P once:

    project      kernel(t) = h(t) P + B for all times, in the compute type and in the order that it is used in
    gradients    the gradients of h and B, and the norm of P's gradient
    update       AdamW on P

P's gradient dP = h^T dW never exists: the pair (h, dW) stands for it, and tiles of dP come and go in VMEM.

They work on one device's part of a layer, unless `blocks.reason_against` has something against it. Matrix products have
fp32 operands, which TPUs round to bf16 as they read them, as they do for XLA.
"""
