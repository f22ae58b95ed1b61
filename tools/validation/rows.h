// Rows by operator: which kernel stands for each, with which tensors, and how far its schedule is known. A row that its
// function cannot take is skipped for a reason.
#ifndef CUBIST_TOOLS_VALIDATION_ROWS_H_
#define CUBIST_TOOLS_VALIDATION_ROWS_H_

#include "tools/validation/row_recorder.h"

namespace cubist {

// product_rows.cc
void ScheduleRow(RowRecorder& r);  // of the form of CSV that has M, N and K
void GemmRow(RowRecorder& r);
void CoreMatmulRow(RowRecorder& r);
void GroupedRow(RowRecorder& r);

// attention_rows.cc
void AttentionRow(RowRecorder& r);

// stream_rows.cc
void ReadGmRow(RowRecorder& r);
void ElementwiseRow(RowRecorder& r);
void SwiGluRow(RowRecorder& r);
void RmsNormRow(RowRecorder& r);
void SoftmaxRow(RowRecorder& r);
void TransposeRow(RowRecorder& r);
void RotaryRow(RowRecorder& r);

// routing_rows.cc
void InitRoutingRow(RowRecorder& r);
void ReRoutingRow(RowRecorder& r);
void FinalizeRow(RowRecorder& r);

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_ROWS_H_
