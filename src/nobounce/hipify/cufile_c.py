"""cuFile's C names and hipFile's (cufile.h, hipfile.h). Members of structures that are called
otherwise stand by themselves."""

from __future__ import annotations

from nobounce.hipify.cufile_names import BOOL_PARAMETERS, OP_ERRORS, SIZE_PARAMETERS

CALLS: dict[str, str] = {
    f"cuFile{name}": f"hipFile{name}"
    for name in [
        "HandleRegister",
        "HandleDeregister",
        "BufRegister",
        "BufDeregister",
        "Read",
        "Write",
        "ReadAsync",
        "WriteAsync",
        "StreamRegister",
        "StreamDeregister",
        "BatchIOSetUp",
        "BatchIOSubmit",
        "BatchIOGetStatus",
        "BatchIOCancel",
        "BatchIODestroy",
        "DriverOpen",
        "DriverClose",
        "UseCount",
        "DriverGetProperties",
        "DriverSetPollMode",
        "DriverSetMaxDirectIOSize",
        "DriverSetMaxCacheSize",
        "DriverSetMaxPinnedMemSize",
        "GetParameterSizeT",
        "GetParameterBool",
        "GetParameterString",
        "SetParameterSizeT",
        "SetParameterBool",
        "SetParameterString",
    ]
} | {
    "cuFileDriverClose_v2": "hipFileDriverClose",
    "cufileop_status_error": "hipFileGetOpErrorString",
}

TYPES: dict[str, str] = {
    f"CUfile{name}": f"hipFile{name}"
    for name in [
        "Error_t",
        "Handle_t",
        "Descr_t",
        "DriverStatusFlags_t",
        "DriverControlFlags_t",
        "FeatureFlags_t",
        "FSOps_t",
        "Opcode_t",
        "Status_t",
        "BatchHandle_t",
        "BatchMode_t",
        "IOParams_t",
        "IOEvents_t",
    ]
} | {
    "CUfileOpError": "hipFileOpError_t",
    "CUfileFileHandleType": "hipFileFileHandleType_t",
    "CUfileDrvProps_t": "hipFileDriverProps_t",
    "cufileRDMAInfo_t": "hipFileRDMAInfo_t",
    "CUFileSizeTConfigParameter_t": "hipFileSizeTConfigParameter_t",
    "CUFileBoolConfigParameter_t": "hipFileBoolConfigParameter_t",
    "CUFileStringConfigParameter_t": "hipFileStringConfigParameter_t",
}
TAGS = {"CUfileOpError": "hipFileOpError", "CUfileFileHandleType": "hipFileFileHandleType"}
"""Behind `enum`: tags, where the names above are those of typedefs."""

CONSTANTS: dict[str, str] = (
    {f"CU_FILE_{name}": f"hipFile{hip}" for name, (_, hip) in OP_ERRORS.items()}
    | {f"CUFILE_PARAM_{name}": hip for name, hip in {**SIZE_PARAMETERS, **BOOL_PARAMETERS}.items()}
    | {
        "CUFILE_PARAM_LOGGING_LEVEL": "hipFileParamLoggingLevel",
        "CUFILE_PARAM_ENV_LOGFILE_PATH": "hipFileParamEnvLogfilePath",
        "CUFILE_PARAM_LOG_DIR": "hipFileParamLogDir",
        "CU_FILE_HANDLE_TYPE_OPAQUE_FD": "hipFileHandleTypeOpaqueFD",
        "CU_FILE_HANDLE_TYPE_OPAQUE_WIN32": "hipFileHandleTypeOpaqueWin32",
        "CU_FILE_HANDLE_TYPE_USERSPACE_FS": "hipFileHandleTypeUserspaceFS",
        "CU_FILE_RDMA_REGISTER": "HIPFILE_RDMA_REGISTER",
        "CU_FILE_RDMA_RELAXED_ORDERING": "HIPFILE_RDMA_RELAXED_ORDERING",
        "CU_FILE_STREAM_FIXED_BUF_OFFSET": "HIPFILE_STREAM_FIXED_BUF_OFFSET",
        "CU_FILE_STREAM_FIXED_FILE_OFFSET": "HIPFILE_STREAM_FIXED_FILE_OFFSET",
        "CU_FILE_STREAM_FIXED_FILE_SIZE": "HIPFILE_STREAM_FIXED_FILE_SIZE",
        "CU_FILE_STREAM_PAGE_ALIGNED_INPUTS": "HIPFILE_STREAM_PAGE_ALIGNED_INPUTS",
        "CU_FILE_LUSTRE_SUPPORTED": "hipFileLustreSupported",
        "CU_FILE_WEKAFS_SUPPORTED": "hipFileWekaFSSupported",
        "CU_FILE_NFS_SUPPORTED": "hipFileNFSSupported",
        "CU_FILE_GPFS_SUPPORTED": "hipFileGPFSSupported",
        "CU_FILE_NVME_SUPPORTED": "hipFileNVMeSupported",
        "CU_FILE_NVMEOF_SUPPORTED": "hipFileNVMeoFSupported",
        "CU_FILE_SCSI_SUPPORTED": "hipFileSCSISupported",
        "CU_FILE_SCALEFLUX_CSD_SUPPORTED": "hipFileScaleFluxCSDSupported",
        "CU_FILE_NVMESH_SUPPORTED": "hipFileNVMeshSupported",
        "CU_FILE_BEEGFS_SUPPORTED": "hipFileBeeGFSSupported",
        "CU_FILE_NVME_P2P_SUPPORTED": "hipFileNVMeP2PSupported",
        "CU_FILE_SCATEFS_SUPPORTED": "hipFileScatefsSupported",
        "CU_FILE_USE_POLL_MODE": "hipFileUsePollMode",
        "CU_FILE_ALLOW_COMPAT_MODE": "hipFileAllowCompatMode",
        "CU_FILE_DYN_ROUTING_SUPPORTED": "hipFileDynRoutingSupported",
        "CU_FILE_BATCH_IO_SUPPORTED": "hipFileBatchIOSupported",
        "CU_FILE_STREAMS_SUPPORTED": "hipFileStreamsSupported",
        "CU_FILE_PARALLEL_IO_SUPPORTED": "hipFileParallelIOSupported",
        "CUFILE_READ": "hipFileBatchRead",
        "CUFILE_WRITE": "hipFileBatchWrite",
        "CUFILE_BATCH": "hipFileBatch",
        "CUFILE_WAITING": "hipFileWaiting",
        "CUFILE_PENDING": "hipFilePending",
        "CUFILE_INVALID": "hipFileInvalid",
        "CUFILE_CANCELED": "hipFileCanceled",
        "CUFILE_COMPLETE": "hipFileComplete",
        "CUFILE_TIMEOUT": "hipFileTimeout",
        "CUFILE_FAILED": "hipFileFailed",
        "CUFILEOP_BASE_ERR": "HIPFILE_BASE_ERR",
        "CUFILE_ERRSTR": "HIPFILE_ERRSTR",
        "IS_CUFILE_ERR": "IS_HIPFILE_ERR",
        "IS_CUDA_ERR": "IS_HIP_DRV_ERR",
        "CU_FILE_CUDA_ERR": "HIP_DRV_ERR",
    }
)

MEMBERS = {
    "cu_err": "hip_drv_err",
    "dstatusflags": "driver_status_flags",
    "dcontrolflags": "driver_control_flags",
    "fflags": "feature_flags",
}
"""Members of CUfileError_t and CUfileDrvProps_t that hipFile calls otherwise."""

LEFT = {
    "cuFileGetVersion": "it takes one number, hipFileGetVersion three: major, minor, patch",
}
