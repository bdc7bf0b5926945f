// SPDX-License-Identifier: Apache-2.0
// The result of host functions, which do not throw: ok, or a kind of error with a full sentence.
#ifndef KERNELS_SM90_STATUS_H_
#define KERNELS_SM90_STATUS_H_

#include <memory>
#include <string>
#include <utility>

namespace tiercel {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // ValueError: shapes, strides, devices, ranges
  kTypeError,        // TypeError: dtypes
  kUnimplemented,    // NotImplementedError: valid, but no kernel for it
  kRuntimeError,     // RuntimeError: driver, device, launch
};

// One pointer; ok is null, so that a successful launch constructs no string.
class [[nodiscard]] Status {
 public:
  Status() = default;

  static Status InvalidArgument(std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message));
  }
  static Status TypeError(std::string message) {
    return Status(StatusCode::kTypeError, std::move(message));
  }
  static Status Unimplemented(std::string message) {
    return Status(StatusCode::kUnimplemented, std::move(message));
  }
  static Status RuntimeError(std::string message) {
    return Status(StatusCode::kRuntimeError, std::move(message));
  }

  Status(const Status& other)
      : error_(other.error_ ? std::make_unique<Error>(*other.error_) : nullptr) {}
  Status& operator=(const Status& other) {
    if (this != &other) error_ = other.error_ ? std::make_unique<Error>(*other.error_) : nullptr;
    return *this;
  }
  Status(Status&&) = default;
  Status& operator=(Status&&) = default;

  bool ok() const { return error_ == nullptr; }
  StatusCode code() const { return error_ ? error_->code : StatusCode::kOk; }
  const std::string& message() const {
    static const std::string empty;
    return error_ ? error_->message : empty;
  }

 private:
  struct Error {
    StatusCode code;
    std::string message;
  };
  Status(StatusCode code, std::string message)
      : error_(std::make_unique<Error>(Error{code, std::move(message)})) {}

  std::unique_ptr<Error> error_;
};

}  // namespace tiercel

// Returns from the calling function if the Status is not ok.
#define TIERCEL_RETURN_IF_ERROR(expr)                                                           \
  do {                                                                                          \
    if (::tiercel::Status tiercel_status = (expr); !tiercel_status.ok()) return tiercel_status; \
  } while (false)

#endif  // KERNELS_SM90_STATUS_H_
