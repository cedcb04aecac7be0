"""HIP's enums and flags by their own names and numbers (hip_runtime_api.h), as AMD's
Python bindings spell them."""

from __future__ import annotations

import enum


class hipError_t(enum.IntEnum):
    """A status. Those that the runtimes give; others of the vendor are `hipErrorUnknown`."""

    hipSuccess = 0
    hipErrorInvalidValue = 1
    hipErrorOutOfMemory = 2
    hipErrorNotInitialized = 3
    hipErrorDeinitialized = 4
    hipErrorInvalidDevicePointer = 17
    hipErrorInvalidMemcpyDirection = 21
    hipErrorInsufficientDriver = 35
    hipErrorNoDevice = 100
    hipErrorInvalidDevice = 101
    hipErrorInvalidContext = 201
    hipErrorInvalidHandle = 400
    hipErrorIllegalState = 401
    hipErrorNotReady = 600
    hipErrorIllegalAddress = 700
    hipErrorPeerAccessAlreadyEnabled = 704
    hipErrorPeerAccessNotEnabled = 705
    hipErrorContextIsDestroyed = 709
    hipErrorHostMemoryAlreadyRegistered = 712
    hipErrorHostMemoryNotRegistered = 713
    hipErrorLaunchFailure = 719
    hipErrorNotSupported = 801
    hipErrorUnknown = 999


class hipMemcpyKind(enum.IntEnum):
    """The direction of a copy; `hipMemcpyDefault` infers it from the pointers (HIP rules 64, 65)."""

    hipMemcpyHostToHost = 0
    hipMemcpyHostToDevice = 1
    hipMemcpyDeviceToHost = 2
    hipMemcpyDeviceToDevice = 3
    hipMemcpyDefault = 4


hipStreamDefault = 0
hipStreamNonBlocking = 1
hipEventDefault = 0
hipEventBlockingSync = 1
hipEventDisableTiming = 2
hipEventInterprocess = 4
hipHostMallocDefault = 0
hipHostMallocPortable = 1
hipHostRegisterDefault = 0
hipHostRegisterPortable = 1
hipMemAttachGlobal = 1

hipStream_t = int
hipEvent_t = int
"""Handles are ints here."""
