// Declares what torch's complex numbers name of thrust. Kernels that compute with complex numbers are compiled with thrust's own header.
#pragma once

namespace thrust {

template <class T> struct complex {
    __host__ __device__ complex(T = T(), T = T());
    __host__ __device__ T real() const;
    __host__ __device__ T imag() const;
};
template <class T, class U> __host__ __device__ complex<T> pow(const T&, const U&);
template <class T> __host__ __device__ complex<T> exp(const complex<T>&);
template <class T> __host__ __device__ complex<T> log(const complex<T>&);
template <class T> __host__ __device__ complex<T> log10(const complex<T>&);
template <class T> __host__ __device__ complex<T> log2(const complex<T>&);
template <class T> __host__ __device__ complex<T> sqrt(const complex<T>&);
template <class T> __host__ __device__ complex<T> sin(const complex<T>&);
template <class T> __host__ __device__ complex<T> cos(const complex<T>&);
template <class T> __host__ __device__ complex<T> tan(const complex<T>&);
template <class T> __host__ __device__ complex<T> asin(const complex<T>&);
template <class T> __host__ __device__ complex<T> acos(const complex<T>&);
template <class T> __host__ __device__ complex<T> atan(const complex<T>&);
template <class T> __host__ __device__ complex<T> sinh(const complex<T>&);
template <class T> __host__ __device__ complex<T> cosh(const complex<T>&);
template <class T> __host__ __device__ complex<T> tanh(const complex<T>&);
template <class T> __host__ __device__ complex<T> asinh(const complex<T>&);
template <class T> __host__ __device__ complex<T> acosh(const complex<T>&);
template <class T> __host__ __device__ complex<T> atanh(const complex<T>&);
template <class T> __host__ __device__ T abs(const complex<T>&);
template <class T> __host__ __device__ T arg(const complex<T>&);
template <class T> __host__ __device__ complex<T> polar(const T&, const T& = T());

}  // namespace thrust
