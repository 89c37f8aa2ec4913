// Files of an artifact, mapped: weights are read by the kernels where they are, and only when they are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace diffbit::runtime {

/// A file's bytes in memory, for reading. Throws Error for a file that cannot be read, or of more than `most` bytes.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path, uint64_t most = UINT64_MAX);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

/// Returns the path of a file of a folder. Throws Error where a name or a symbolic link leads out of it.
std::string path_within(const std::string& folder, const std::string& name);

}  // namespace diffbit::runtime
