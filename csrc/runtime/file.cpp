#include "file.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "../ort/op.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace diffbit::runtime {
namespace {

constexpr char OUTSIDE[] = "%s: is a link to a file outside of the folder; copy the file here";

}  // namespace

#ifdef _WIN32

namespace {

std::wstring wide(const std::string& text) {
  std::wstring result(static_cast<size_t>(MultiByteToWideChar(CP_UTF8, 0, text.data(), static_cast<int>(text.size()), nullptr, 0)), 0);
  MultiByteToWideChar(CP_UTF8, 0, text.data(), static_cast<int>(text.size()), result.data(), static_cast<int>(result.size()));
  return result;
}

}  // namespace

MappedFile::MappedFile(const std::string& path, uint64_t most) {
  const HANDLE file = CreateFileW(wide(path).c_str(), GENERIC_READ, FILE_SHARE_READ, nullptr, OPEN_EXISTING, 0, nullptr);
  if (file == INVALID_HANDLE_VALUE) throw Error("%s: cannot be read (error %lu)", path.c_str(), GetLastError());
  LARGE_INTEGER size;
  HANDLE mapping = nullptr;
  void* view = nullptr;
  const bool is_sized = GetFileSizeEx(file, &size) && size.QuadPart > 0 && static_cast<uint64_t>(size.QuadPart) <= most;
  if (is_sized) mapping = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
  if (mapping) view = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
  if (mapping) CloseHandle(mapping);  // the view keeps both
  CloseHandle(file);
  if (!view) throw Error("%s: is empty, too large, or cannot be mapped", path.c_str());
  data_ = static_cast<const uint8_t*>(view);
  size_ = static_cast<size_t>(size.QuadPart);
}

MappedFile::~MappedFile() { UnmapViewOfFile(data_); }

std::string path_within(const std::string& folder, const std::string& name) {
  const auto real = [](const std::string& path) {
    const HANDLE file = CreateFileW(wide(path).c_str(), 0, FILE_SHARE_READ | FILE_SHARE_WRITE, nullptr, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, nullptr);
    if (file == INVALID_HANDLE_VALUE) throw Error("%s: cannot be read (error %lu)", path.c_str(), GetLastError());
    std::wstring result(32768, 0);
    result.resize(GetFinalPathNameByHandleW(file, result.data(), static_cast<DWORD>(result.size()), 0));
    CloseHandle(file);
    return result;
  };
  const std::string path = folder + "/" + name;
  const std::wstring within = real(folder) + L"\\";
  if (real(path).compare(0, within.size(), within) != 0) throw Error(OUTSIDE, path.c_str());
  return path;
}

#else

MappedFile::MappedFile(const std::string& path, uint64_t most) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // of a pipe it would wait for a writer
  if (file < 0) throw Error("%s: cannot be read (%s)", path.c_str(), std::strerror(errno));
  struct stat about;
  const bool is_file = fstat(file, &about) == 0 && S_ISREG(about.st_mode);
  const uint64_t size = is_file ? static_cast<uint64_t>(about.st_size) : 0;
  void* data = MAP_FAILED;
  if (size && size <= most && size <= SIZE_MAX) data = mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (!is_file) throw Error("%s: is not a file", path.c_str());
  if (!size) throw Error("%s: is empty; restore the file or export the model again", path.c_str());
  if (size > most) throw Error("%s: has %lld bytes, wanted at most %lld", path.c_str(), number(static_cast<int64_t>(size)), number(static_cast<int64_t>(most)));
  if (data == MAP_FAILED) throw Error("%s: cannot be mapped (%s)", path.c_str(), std::strerror(errno));
  data_ = static_cast<const uint8_t*>(data);
  size_ = static_cast<size_t>(size);
}

MappedFile::~MappedFile() { munmap(const_cast<uint8_t*>(data_), size_); }

std::string path_within(const std::string& folder, const std::string& name) {
  const auto real = [](const std::string& path) {
    char* found = realpath(path.c_str(), nullptr);
    if (!found) throw Error("%s: cannot be read (%s)", path.c_str(), std::strerror(errno));
    const std::string result = found;
    std::free(found);
    return result;
  };
  const std::string path = folder + "/" + name, within = real(folder) + "/";
  if (real(path).compare(0, within.size(), within) != 0) throw Error(OUTSIDE, path.c_str());
  return path;
}

#endif

}  // namespace diffbit::runtime
