/* cuBLAS: whatever PyTorch calls answers "success" and computes nothing. Here are those that must also hand something out;
 * all others that PyTorch imports are written by the build (build.py). */
#include "gpuless.h"

#include <string.h>

static int anything;

static int give_handle(void **handle) {
    *handle = &anything;
    return 0;
}

static int give_zero(int *value) {
    *value = 0;
    return 0;
}

EXPORT int cublasCreate_v2(void **handle) { return give_handle(handle); }

EXPORT int cublasLtCreate(void **handle) { return give_handle(handle); }

EXPORT int cublasLtMatmulDescCreate(void **handle) { return give_handle(handle); }

EXPORT int cublasLtMatmulPreferenceCreate(void **handle) { return give_handle(handle); }

EXPORT int cublasLtMatrixLayoutCreate(void **handle) { return give_handle(handle); }

EXPORT int cublasGetMathMode(void *handle, int *mode) { return (void)handle, give_zero(mode); }

EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, give_zero(mode); }

EXPORT size_t cublasLtGetVersion(void) { return 130100; }

/* cublasLtMatmulHeuristicResult_t (cublasLt.h): an algorithm of 64 bytes, its workspace, its state (0: it works), waves. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

/* PyTorch needs one result. */
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                          int wished, struct heuristic *results, int *count) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    memset(results, 0, (size_t)wished * sizeof *results);
    *count = 1;
    return 0;
}
