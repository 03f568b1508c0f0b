// The output of a rank, of which there is a file only once there is any (rank_log.cpp).

#pragma once

namespace failure {

// Sends the output of this process to memory, and later to a file; `screen` is where it goes if the
// file cannot be opened. Returns an error number, 0 if that has worked.
int rank_log_begin(const char* file, int screen);

// Moves the output to the file. Returns 0 if there was none, or another thread is moving it and does
// not end; 1 if it is there; a negative error number if it went to the screen.
int rank_log_write();

// Lets go of the memory. The caller has put the outputs back before.
void rank_log_end();

}  // namespace failure
